# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import sys

with open("/dev/null", "w") as nowhere, open("/dev/urandom", "rb") as random:
    print(random.read(4), file=nowhere)
print(sum(map(int, input().split())))
