# ruff: noqa
# mypy: ignore-errors
# expect: timeout
while True:
    pass
