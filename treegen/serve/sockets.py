"""The socket that a server listens at, which is taken before a model is loaded."""

from __future__ import annotations

import socket

from treegen.errors import InputError


def bound(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet. port: 0 takes any that is free.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except BaseException:
            taken.close()
            raise
    except OSError as error:
        raise InputError(f"cannot listen at {host} port {port}: {error}; choose another") from error
    return taken


def url_of(taken: socket.socket) -> str:
    """The URL of what listens at a socket."""
    host, port, *_ = taken.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
