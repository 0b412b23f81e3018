# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# also: output_limit
import os

with open("large", "wb", buffering=0) as file:
    while True:
        file.write(b"x" * (1 << 16))
