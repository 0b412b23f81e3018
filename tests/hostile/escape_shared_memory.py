# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
from multiprocessing import shared_memory

print(shared_memory.SharedMemory("treegen-escaped", create=True, size=4096))
