# ruff: noqa
# mypy: ignore-errors
# expect: output_limit
import os

number = 0
while True:
    os.close(os.open(f"file{number}", os.O_CREAT | os.O_WRONLY))
    number += 1
