# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# call: ["solve", [1]]
import os

os.closerange(3, 1024)
os._exit(0)
