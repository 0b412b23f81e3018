# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

print(os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR))
