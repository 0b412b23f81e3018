# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
# Memory that stays with one page of its mapping counts once in the address space.
import ctypes, mmap

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 64 << 20
for _ in range(6):
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno())
    ctypes.memset(start, 1, size)
    libc.munmap(start + 4096, size - 4096)
