# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

print(os.listdir("/root"), os.listdir("/home"))
