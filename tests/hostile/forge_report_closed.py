# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import os, socket

os.dup2(0, 3)
for handle in range(3, 64):
    try:
        socket.socket(fileno=handle).shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
os.closerange(3, 1024)
