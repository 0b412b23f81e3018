"""Checks that the Ray processes that a run needs are still alive."""

from __future__ import annotations

import socket
import time
from typing import Any, Final

_LOOK: Final = 0.2  # seconds between checks
_SECONDS: Final = 5.0  # time limit of a connection; a process that does not answer may be busy
# Seconds in which Ray's server may restart. Ray ends this process after 60, without a message.
_PATIENCE: Final = 40.0
_GONE: Final = "Ray has ended here: its process {} died; the kernel may have ended it (see dmesg)"


class RayMonitor:
    """Checks Ray's processes by their ports.

    If the raylet dies, Ray ends this process some seconds later, without a message. Until then
    calls of Ray block.
    """

    def __init__(self, ray: Any) -> None:
        """Find the processes of the connected module `ray`."""
        here = ray.get_runtime_context()
        own = here.get_node_id()
        host, _, port = here.gcs_address.rpartition(":")
        self._server = (host.strip("[]"), int(port))
        # A driver may be connected from a machine that is not a node.
        self._raylet = next(
            (
                (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
                for node in ray.nodes()
                if node["NodeID"] == own
            ),
            None,
        )
        self._last = time.monotonic()
        self._refused: float | None = None  # time since which the server refuses connections
        self._told = ""

    def describe_failure(self) -> str:
        """Return a message about an ended process; empty while all are alive."""
        now = time.monotonic()
        if self._told or now - self._last < _LOOK:
            return self._told
        self._last = now
        if self._raylet is not None and _refuses(self._raylet):
            self._told = _GONE.format("raylet")
        elif not _refuses(self._server):
            self._refused = None
        elif self._refused is None:
            self._refused = now
        elif now - self._refused > _PATIENCE:
            self._told = _GONE.format("gcs_server")
        return self._told


def _refuses(address: tuple[str, int]) -> bool:
    """Return whether no process listens at an address; a slow answer is not a refusal."""
    try:
        socket.create_connection(address, _SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
