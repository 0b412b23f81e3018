# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.prlimit(os.getppid(), 7, None, ctypes.create_string_buffer(16))
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
