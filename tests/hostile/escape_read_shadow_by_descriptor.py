# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
print(os.open("etc/shadow", os.O_RDONLY, dir_fd=root))
