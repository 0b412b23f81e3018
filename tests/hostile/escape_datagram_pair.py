# ruff: noqa
# mypy: ignore-errors
# expect: runtime_error
import socket

# The ends of a datagram pair can be pointed at any socket of the host.
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
left.sendto(b"x", "/dev/log")
print("escaped")
