# ruff: noqa
# mypy: ignore-errors
# expect: timeout
import os

while True:
    os.write(2, b"x" * 65536)
