# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

os.setresuid(0, 0, 0)
print(os.getuid())
