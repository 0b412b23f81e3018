# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: output_limit
# Blocks beyond the end of a file are not in its size.
import ctypes, os, time

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
for name in "abcd":
    if libc.fallocate(os.open(name, os.O_CREAT | os.O_WRONLY), 1, 0, 8 << 20):  # KEEP_SIZE
        raise OSError(ctypes.get_errno())
time.sleep(0.2)
