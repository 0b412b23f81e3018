# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import time

time.clock_settime(time.CLOCK_REALTIME, 0)
print(1)
