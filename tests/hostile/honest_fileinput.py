# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import fileinput

for line in fileinput.input():
    print(sum(map(int, line.split())))
