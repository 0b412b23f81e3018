# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# machine: x86_64
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
