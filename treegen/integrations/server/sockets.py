"""The server's socket, which is bound before a model is loaded."""

from __future__ import annotations

import errno
import socket
from typing import Any

from treegen.errors import InputError


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet.

    Args:
        host: Host name or address.
        port: Port; 0 takes any free one.

    Raises:
        InputError: The address cannot be used.
    """
    if not 0 <= port < 2**16:  # getaddrinfo uses the last 16 bits of other numbers
        raise InputError(f"the port must be between 0 and 65535, got {port}")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            # Without SO_REUSEADDR, so that a second server fails here, and not after it has loaded
            # its model: sockets with SO_REUSEADDR that do not listen may share an address.
            return _bind_address(family, kind, address, reuse=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        # Closing connections of an earlier server may block the address, which is harmless.
        return _bind_address(family, kind, address, reuse=True)
    except (OSError, UnicodeError) as error:  # a name that is no host name has no IDNA form
        raise InputError(
            f"cannot listen at {host} port {port}: {error}; choose another port"
        ) from error


def _bind_address(family: int, kind: int, address: Any, *, reuse: bool) -> socket.socket:
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def prepare_to_listen(bound: socket.socket) -> None:
    """Let the next server bind the same address as soon as this one has ended."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)


def url_of(bound: socket.socket) -> str:
    """Return the URL of a server that listens on a socket."""
    host, port, *_ = bound.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
