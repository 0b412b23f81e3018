# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

for name in ("/proc/self/fd/0", "/dev/fd/0"):
    try:
        os.write(os.open(name, os.O_RDWR), b"changed")
        print("escaped")
        os._exit(0)
    except OSError:
        pass
os.write(0, b"changed")
