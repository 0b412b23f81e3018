# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.shmget(0x7EE6, 4096, 0o1666)
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
