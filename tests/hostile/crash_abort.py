# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

os.abort()
