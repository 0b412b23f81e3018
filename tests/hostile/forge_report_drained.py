# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# Whoever can read the report can take the judge's words away and leave its own.
import os

handle = os.open("/proc/self/fd/3", os.O_RDONLY | os.O_NONBLOCK)
os.read(handle, 1 << 16)
os.write(3, b"ready")
