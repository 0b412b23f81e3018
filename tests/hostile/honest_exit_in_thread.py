# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import os, sys

print(sum(map(int, input().split())))
sys.stdout.flush()
os._exit(0)
