# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import atexit, os

atexit.register(lambda: os._exit(0))
print("no")
