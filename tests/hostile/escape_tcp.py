# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

print(socket.create_connection(("127.0.0.1", 22), 1))
