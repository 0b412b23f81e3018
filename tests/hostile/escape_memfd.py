# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.memfd_create(b"x", 0)
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
