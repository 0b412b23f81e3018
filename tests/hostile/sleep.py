# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import time

time.sleep(1000)
