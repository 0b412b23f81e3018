"""Ray, started on this machine for one process, or connected to where it runs."""

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

# Bytes, which are used as they are filled; Ray takes no less than 75 MiB.
_OBJECT_STORE: Final = 80 * 2**20
_SECONDS: Final = 15.0  # for an address to answer
# How a connection of HTTP/2, which Ray speaks, begins: a preface, then settings from both sides.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS: Final = b"\x04"
# Read when Ray is imported. It tells its maker nothing, and listens on the loopback device alone;
# who connects needs a token that no other process knows.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # It prints of dead workers to stdout, where ours is for programs. We tell of them ourselves.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_PRIVATE: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Else workers give way to all other processes, such as programs that are judged meanwhile.
    "RAY_worker_niceness": "0",
}


class RaySession:
    """Ray while it is used; what was started here is stopped by `close`.

    It also ends with this process, however that ends: the kernel stops what it started.
    ray: the module.
    """

    def __init__(self, places: Placement, cpus: int) -> None:
        """Start Ray here with so many CPUs, or connect.

        A Ray that this process has already is taken as it is.

        Raises InputError for an address where no Ray is, WorkerError if it does not start.
        """
        if places.address not in (None, "auto"):
            _check_answers(places.address)
        self.ray: Any = _import_ray(private=places.address is None)
        self._pulse: RayMonitor | None = None
        self._is_ours = not self.ray.is_initialized()  # else the caller ends it
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
        """What of Ray has ended, in words, so that nothing goes on; empty as long as it works."""
        if self._pulse is None:
            self._pulse = RayMonitor(self.ray)
        return self._pulse.describe_failure()

    def get_free_resources(self) -> dict[str, float]:
        """What all nodes together have that nobody uses."""
        found: dict[str, float] = self.ray.available_resources()
        return found

    def describe_worker_error(self, error: Exception) -> str:
        """Return in one line what Ray's error says of a worker."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.OutOfMemoryError):
            return "Ray ended it, for its machine had no memory left"
        if isinstance(error, exceptions.RayActorError | exceptions.WorkerCrashedError):
            return "its process died; the kernel may have ended it for want of memory (see dmesg)"
        if isinstance(error, exceptions.RayTaskError):  # whose own text is a traceback
            error = error.cause
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def close(self) -> None:
        """Stop what was started here, or leave."""
        if self._is_ours:
            self._is_ours = False
            with defer_signals():
                self.ray.shutdown()


def _import_ray(*, private: bool) -> Any:
    """Import Ray, which reads its environment then; what the user has set there stands."""
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
        return  # it speaks to those alone who show a certificate
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
    """Let Ray see some of the GPUs that this process sees."""
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
