# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: memory_limit
import mmap

maps = []
while True:
    maps.append(mmap.mmap(-1, 64 << 20))
