# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import os

os.link("/etc/passwd", "link")
print(open("link").read())
