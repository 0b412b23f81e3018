"""Whether the processes of Ray without which nothing goes on are still there."""

from __future__ import annotations

import socket
import time
from typing import Any, Final

_LOOK: Final = 0.2  # seconds between looks
_SECONDS: Final = 5.0  # for an answer; who does not answer may be busy
# Seconds in which Ray's own server may start again. It ends this process after 60, without a word.
_PATIENCE: Final = 40.0
_GONE: Final = "Ray has ended here: its process {} died; the kernel may have ended it (see dmesg)"


class RayMonitor:
    """Looks at Ray's processes by their ports.

    Ray itself ends a process whose raylet has died some seconds later, without a word. Until then
    its calls wait.
    """

    def __init__(self, ray: Any) -> None:
        """Find the processes. ray: the module, connected."""
        here = ray.get_runtime_context()
        own = here.get_node_id()
        host, _, port = here.gcs_address.rpartition(":")
        self._server = (host.strip("[]"), int(port))
        # A driver may be connected from a machine that is no node.
        self._raylet = next(
            (
                (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
                for node in ray.nodes()
                if node["NodeID"] == own
            ),
            None,
        )
        self._last = time.monotonic()
        self._refused: float | None = None  # since when the server does not answer
        self._told = ""

    def describe_failure(self) -> str:
        """Which process has ended, in words; empty as long as all are there."""
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
    """Whether nobody listens at an address; to be slow is no refusal."""
    try:
        socket.create_connection(address, _SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
