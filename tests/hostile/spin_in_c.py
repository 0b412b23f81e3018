# ruff: noqa
# mypy: ignore-errors
# expect: timeout
print(sum(range(10**12)))
