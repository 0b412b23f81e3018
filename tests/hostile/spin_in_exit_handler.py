# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import atexit


@atexit.register
def spin():
    while True:
        pass
