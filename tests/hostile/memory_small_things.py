# ruff: noqa
# mypy: ignore-errors
# expect: memory_limit
# also: timeout
x = []
while True:
    x.append([x] * 100000)
