# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

print([name for name in os.listdir("/proc") if name.isdigit()])
