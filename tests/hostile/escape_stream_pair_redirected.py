# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

left, right = socket.socketpair()
right.close()
left.connect("/dev/log")
print("escaped")
