# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3\r\n4"
# answer: "7"
import sys

sys.stdout.write(str(sum(map(int, sys.stdin))))
