# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import bisect, cmath, decimal, fractions, itertools, sqlite3, zlib, hashlib, statistics, string
import json, csv, heapq, random, secrets, uuid, unittest, inspect, ast, textwrap, pprint, zoneinfo

random.seed(1), random.random()
print(sum(map(int, input().split())))
