# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

s = socket.socket(socket.AF_UNIX)
s.bind("\0treegen-escaped")
print(s)
