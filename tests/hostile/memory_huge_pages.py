# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
import mmap

mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
