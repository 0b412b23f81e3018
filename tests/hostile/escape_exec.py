# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os, sys

os.execv(sys.executable, ["python", "-c", "print(1)"])
