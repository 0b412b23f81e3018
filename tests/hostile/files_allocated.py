# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: output_limit
import os, time

for name in map(str, range(8)):
    os.posix_fallocate(os.open(name, os.O_CREAT | os.O_WRONLY), 0, 1 << 20)
time.sleep(0.2)
