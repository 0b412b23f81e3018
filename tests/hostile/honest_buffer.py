# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import sys

print(sum(map(int, sys.stdin.buffer.read().split())))
