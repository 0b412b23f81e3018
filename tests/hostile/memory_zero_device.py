# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
# A shared mapping of /dev/zero is anonymous memory under another name.
import ctypes, mmap, os

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 64 << 20
zero = os.open("/dev/zero", os.O_RDWR)
for _ in range(6):
    start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, zero, 0)
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno())
    ctypes.string_at(start, size)
    libc.munmap(start + 4096, size - 4096)
