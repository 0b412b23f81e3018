# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import threading


def spin():
    while True:
        pass


threading.Thread(target=spin).start()
