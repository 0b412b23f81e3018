# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "6000"
# answer: "6001"
n = int(input())
print(len(str(10**n)))
