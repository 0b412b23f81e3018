# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.unshare(0x10000000)
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
