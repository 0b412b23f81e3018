# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

print(socket.create_server(("127.0.0.1", 0)))
