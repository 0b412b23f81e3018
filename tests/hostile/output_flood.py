# ruff: noqa
# mypy: ignore-errors
# expect: output_limit
while True:
    print("x" * 10000)
