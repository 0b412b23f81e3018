# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import threading

lock = threading.Lock()
lock.acquire()
lock.acquire()
