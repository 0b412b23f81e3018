# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

print(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 53)))
