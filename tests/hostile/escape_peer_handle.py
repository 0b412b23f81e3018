# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
# The other end of the report is the judge: a handle to its process, from Linux 6.5 on.
import socket

socket.socket(fileno=3).getsockopt(socket.SOL_SOCKET, 77)
