# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# Without a report the judge might take the blame, and the program would have no score.
import os

os.set_blocking(3, False)
for name in (3, "/proc/self/fd/3", "/dev/fd/3"):
    try:
        handle = name if name == 3 else os.open(name, os.O_RDWR | os.O_NONBLOCK)
        if os.read(handle, 1 << 16):
            os._exit(0)
    except OSError:
        pass
raise SystemExit(1)
