# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
result = libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0)
if result < 0:
    raise OSError(ctypes.get_errno(), "refused")
print("escaped", result)
