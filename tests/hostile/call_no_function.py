# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# call: ["solve", [1]]
x = 1
