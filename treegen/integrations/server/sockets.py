"""The socket that a server listens at, which is taken before a model is loaded."""

from __future__ import annotations

import errno
import socket
from typing import Any

from treegen.errors import InputError


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet. port: 0 takes any that is free.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            # Without SO_REUSEADDR, so that a second server is refused here, and not when it has
            # loaded its model: sockets that have it and do not listen may share an address.
            return _bind_address(family, kind, address, reuse=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        # Connections of a former server may be about to end there, which is no obstacle.
        return _bind_address(family, kind, address, reuse=True)
    except OSError as error:
        raise InputError(f"cannot listen at {host} port {port}: {error}; choose another") from error


def _bind_address(family: int, kind: int, address: Any, *, reuse: bool) -> socket.socket:
    taken = socket.socket(family, kind)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        taken.bind(address)
    except BaseException:
        taken.close()
        raise
    return taken


def prepare_to_listen(taken: socket.socket) -> None:
    """Prepare a socket to listen: the next server may have its address once this one has ended."""
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)


def url_of(taken: socket.socket) -> str:
    """The URL of what listens at a socket."""
    host, port, *_ = taken.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
