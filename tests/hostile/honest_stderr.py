# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import sys

for _ in range(2000):
    print("noise " * 20, file=sys.stderr)
print(sum(map(int, input().split())))
