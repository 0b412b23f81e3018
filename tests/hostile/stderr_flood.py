# ruff: noqa
# mypy: ignore-errors
# expect: output_limit
import os

while True:
    os.write(2, b"x" * 65536)
