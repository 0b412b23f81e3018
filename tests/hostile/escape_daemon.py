# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os, time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("escaped")
