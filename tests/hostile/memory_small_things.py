# ruff: noqa
# mypy: ignore-errors
# expect: memory_limit
x = []
while True:
    x.append([x] * 100000)
