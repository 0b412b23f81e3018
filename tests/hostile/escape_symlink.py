# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

os.symlink("/etc/passwd", "link")
print(open("link").read())
