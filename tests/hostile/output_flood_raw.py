# ruff: noqa
# mypy: ignore-errors
# expect: output_limit
import os

while True:
    os.write(1, b"x" * 65536)
