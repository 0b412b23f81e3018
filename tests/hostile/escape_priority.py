# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

os.setpriority(os.PRIO_PROCESS, os.getppid(), 10)
print(1)
