"""A Ray session: started on this machine for one process, or connected to a running cluster."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from treegen.cluster.placement import Placement
from treegen.cluster.ray_monitor import RayMonitor
from treegen.cluster.signal_deferral import defer_signals
from treegen.errors import InputError, WorkerError

# Bytes, allocated as they are filled; Ray requires at least 75 MiB.
_OBJECT_STORE: Final = 80 * 2**20
_SECONDS: Final = 15.0  # time limit for an address to answer
# Start of an HTTP/2 connection, which Ray uses: a preface, then settings from both sides.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS: Final = b"\x04"
# Environment variables that Ray reads on import. With them Ray reports no usage statistics, listens
# only on the loopback device, and requires a token that no other process knows.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray prints messages about dead workers to stdout, which other programs read. treegen reports
    # dead workers itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_PRIVATE: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Otherwise workers have a lower priority than other processes, such as sandboxed programs.
    "RAY_worker_niceness": "0",
}


class RaySession:
    """A Ray session; `close` stops Ray if it was started here.

    Ray also ends with this process, however the process ends: the kernel stops Ray's processes.

    ray: the module.
    """

    def __init__(self, places: Placement, cpus: int) -> None:
        """Start Ray here with a number of CPUs, or connect.

        If this process is already connected to Ray, that connection is used.

        Args:
            places: Where workers run.
            cpus: Number of CPUs that Ray manages, if it is started here.

        Raises:
            InputError: no Ray runs at the address.
            WorkerError: Ray does not start.
        """
        if places.address not in (None, "auto"):
            _check_answers(places.address)
        self.ray: Any = _import_ray(private=places.address is None)
        self._pulse: RayMonitor | None = None
        self._is_ours = not self.ray.is_initialized()  # otherwise the caller ends it
        if not self._is_ours:
            return
        if places.address is not None:
            self._join(places.address)
            return
        with _set_visible_gpus(places.gpus):
            self._init(
                address="local",
                num_cpus=cpus,
                num_gpus=len(places.gpus),
                object_store_memory=_OBJECT_STORE,
                include_dashboard=False,
            )

    def _join(self, address: str) -> None:
        try:
            self._init(address=address)
        except WorkerError as error:
            raise InputError(
                f"cannot join the Ray cluster at {address}; this machine must be one of its nodes, "
                f"with the same Ray and Python ({error})"
            ) from error

    def _init(self, **options: Any) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        with defer_signals():
            try:
                self.ray.init(
                    namespace=f"treegen-{uuid.uuid4().hex}",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                    **options,
                )
            except Exception as error:
                self.ray.shutdown()
                told = " ".join(str(error).split())
                raise WorkerError(
                    f"Ray does not start: {told:.300}; `ray stop` ends what an earlier one left"
                ) from error

    def describe_failure(self) -> str:
        """Return a message about an ended process of Ray; empty while Ray works."""
        if self._pulse is None:
            self._pulse = RayMonitor(self.ray)
        return self._pulse.describe_failure()

    def get_free_resources(self) -> dict[str, float]:
        """Return the free resources of all nodes together."""
        found: dict[str, float] = self.ray.available_resources()
        return found

    def describe_worker_error(self, error: Exception) -> str:
        """Describe Ray's error about a worker in one line."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.OutOfMemoryError):
            return "Ray ended it, for its machine had no memory left"
        if isinstance(error, exceptions.RayActorError | exceptions.WorkerCrashedError):
            return "its process died; the kernel may have ended it for want of memory (see dmesg)"
        if isinstance(error, exceptions.RayTaskError):  # its own text is a traceback
            error = error.cause
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def close(self) -> None:
        """Stop Ray, or disconnect from it, unless the caller had connected."""
        if self._is_ours:
            self._is_ours = False
            with defer_signals():
                self.ray.shutdown()


def _import_ray(*, private: bool) -> Any:
    """Import Ray, which then reads its environment variables; the user's values take precedence."""
    values = _QUIET
    if private and "ray" not in sys.modules:
        values = _QUIET | _PRIVATE | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in values.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def _check_answers(address: str) -> None:
    """Raise InputError unless a gRPC server answers at an address; Ray would wait for minutes."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # the server answers only clients with a certificate
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as server:
            server.sendall(_PREFACE)
            answer = server.recv(9)
    except OSError as error:
        told = str(error)
    else:
        if answer[3:4] == _SETTINGS:
            return
        told = "something else than Ray listens there"
    raise InputError(
        f"no Ray answers at the address {address} ({told}); start it there with "
        "`ray start --head`, or leave --ray out to use this machine alone"
    )


@contextmanager
def _set_visible_gpus(gpus: tuple[int, ...]) -> Iterator[None]:
    """Make only some of this process's GPUs visible to Ray."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if gpus:
        seen = before.split(",") if before else [str(index) for index in range(max(gpus) + 1)]
        os.environ[name] = ",".join(seen[index] for index in gpus)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
