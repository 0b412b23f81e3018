"""A Ray session: started on this machine for one process, or connected to a running cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from treegen.common.signals import SIGNALS, second_signal_handler
from treegen.errors import InputError, WorkerError
from treegen.llm.cluster.placement import Placement

# Memory that Ray allocates as objects fill it. Ray requires at least 75 MiB.
_OBJECT_STORE_BYTES: Final = 80 * 2**20
_ANSWER_SECONDS: Final = 15.0  # time limit for an address to answer
# Start of an HTTP/2 connection, which Ray uses: a preface, then settings from both sides.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS: Final = b"\x04"
_POLL_SECONDS: Final = 0.2  # seconds between checks that Ray's processes are alive
_CONNECT_SECONDS: Final = 5.0  # limit of a connection; a process that is silent may be busy
# Seconds in which the server of a Ray cluster may restart. Ray ends this process after 60.
_RESTART_SECONDS: Final = 40.0
_PROCESS_DIED: Final = (
    "Ray stopped, because Ray's process {} died; the kernel may have killed the process (see dmesg)"
)
# Environment variables that Ray reads on import. With them Ray reports no usage statistics, listens
# only on the loopback device, and requires a token that no other process knows.
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray prints messages about dead workers to stdout, which other programs read. treegen reports
    # dead workers itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}
_PRIVATE_ENVIRONMENT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Otherwise workers have a lower priority than other processes, such as sandboxed programs.
    "RAY_worker_niceness": "0",
}


class RaySession:
    """A Ray session; `close` stops Ray if it was started here.

    Ray also ends with this process, however the process ends: the kernel stops Ray's processes.

    Attributes:
        ray: The module.
        monitor: Watches Ray's processes.
    """

    def __init__(self, placement: Placement, cpus: int) -> None:
        """Start Ray here with a number of CPUs, or connect.

        If this process is already connected to Ray, that connection is used.

        Args:
            placement: Where workers run.
            cpus: Number of CPUs that Ray manages, if it is started here.

        Raises:
            InputError: no Ray runs at the address.
            WorkerError: Ray does not start.
        """
        if placement.address not in (None, "auto"):
            _check_answers(placement.address)
        self.ray: Any = _import_ray(private=placement.address is None)
        self._is_started_here = not self.ray.is_initialized()  # otherwise the caller ends it
        patience = _RESTART_SECONDS
        if self._is_started_here and placement.address is not None:
            self._join(placement.address)
        elif self._is_started_here:
            patience = 0.0  # nothing restarts the server
            with _set_visible_gpus(placement.gpus):
                self._init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=len(placement.gpus),
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                )
        try:
            with defer_signals():
                self.monitor = RayMonitor(self.ray, patience)
        except Exception as error:
            self.close()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise WorkerError(f"Ray stopped while it started: {reason:.300}; try again") from error

    def _join(self, address: str) -> None:
        try:
            self._init(address=address)
        except WorkerError as error:
            raise InputError(
                f"cannot join the Ray cluster at {address}: {error}; check that this machine "
                "is a node of the cluster, with the same versions of Ray and Python"
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
                reason = " ".join(str(error).split())
                raise WorkerError(
                    f"Ray failed to start: {reason:.300}; end earlier Ray processes with `ray stop`"
                ) from error

    def get_free_resources(self) -> dict[str, float]:
        """Return the free resources of all nodes together."""
        resources: dict[str, float] = self.ray.available_resources()
        return resources

    def is_death(self, error: Exception) -> bool:
        """Return whether Ray's error about a worker says that its process died."""
        names = "RayActorError", "WorkerCrashedError", "OutOfMemoryError"
        return isinstance(error, tuple(getattr(self.ray.exceptions, name) for name in names))

    def describe_worker_error(self, error: Exception) -> str:
        """Describe Ray's error about a worker in one line."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.OutOfMemoryError):
            return "Ray ended its process, because its machine ran out of memory"
        if self.is_death(error):
            return "its process died; the kernel may have killed it to free memory (see dmesg)"
        if isinstance(error, exceptions.RayTaskError):  # its own text is a traceback
            error = error.cause
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def close(self) -> None:
        """Stop Ray, or disconnect from it, unless the caller had connected."""
        if self._is_started_here:
            self._is_started_here = False
            with defer_signals():
                self.ray.shutdown()


def _import_ray(*, private: bool) -> Any:
    """Import Ray, which then reads its environment variables; the user's values take precedence."""
    values = _ENVIRONMENT
    if private and "ray" not in sys.modules:
        values = _ENVIRONMENT | _PRIVATE_ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
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
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS
        ) as server:
            server.sendall(_PREFACE)
            answer = server.recv(9)
    except OSError as error:
        reason = str(error)
    else:
        if answer[3:4] == _SETTINGS:
            return
        reason = "another program listens there"
    raise InputError(
        f"no Ray cluster responds at the address {address} ({reason}); start the cluster there "
        "with `ray start --head`, or remove --ray to use only this machine"
    )


@contextmanager
def _set_visible_gpus(gpus: tuple[int, ...]) -> Iterator[None]:
    """Make only some of this process's GPUs visible to Ray."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if gpus:
        visible = before.split(",") if before else [str(index) for index in range(max(gpus) + 1)]
        os.environ[name] = ",".join(visible[index] for index in gpus)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


class RayMonitor:
    """Checks Ray's processes by their ports.

    If the raylet dies, Ray ends this process some seconds later, without a message, and a minute
    after its server dies. Until then calls of Ray block.

    Attributes:
        refused_since: Time since which Ray's server refuses connections; None while it listens.
            Without the server calls of Ray may block.
    """

    def __init__(self, ray: Any, patience: float) -> None:
        """Find the addresses of Ray's processes, which must all be alive.

        Args:
            ray: The connected module.
            patience: Seconds in which Ray's server may restart.
        """
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        host, _, port = context.gcs_address.rpartition(":")
        self._server = (host.strip("[]"), int(port))
        # A driver may be connected from a machine that is not a node.
        self._raylet = next(
            (
                (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
                for node in ray.nodes()
                if node["NodeID"] == node_id
            ),
            None,
        )
        self._patience = patience
        self._last = time.monotonic()
        self.refused_since: float | None = None
        self._failure = ""

    def describe_failure(self, *, at_once: bool = False) -> str:
        """Return a message about an ended process; empty while all are alive.

        Args:
            at_once: Whether to check now. Default: reuse the result of the last 0.2 seconds.
        """
        now = time.monotonic()
        if self._failure or (now - self._last < _POLL_SECONDS and not at_once):
            return self._failure
        self._last = now
        if self._raylet is not None and _refuses(self._raylet):
            self._failure = _PROCESS_DIED.format("raylet")
        elif not _refuses(self._server):
            self.refused_since = None
        else:
            if self.refused_since is None:
                self.refused_since = now
            if now - self.refused_since >= self._patience:
                self._failure = _PROCESS_DIED.format("gcs_server")
        return self._failure


def _refuses(address: tuple[str, int]) -> bool:
    """Return whether no process listens at an address; a slow answer is not a refusal."""
    try:
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def defer_signals() -> Iterator[None]:
    """Hold the first of SIGNALS until the end of the block; then call its handler as usual.

    If a handler raises during a call of Ray, its exception is replaced by another one, and Ray
    remains half started. Ray's own handlers, which it installs in place of ours, end the process. A
    second signal ends the process, in case the call never returns (`second_signal_handler`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ignored signals stay ignored, and signals without a handler end the process at once.
    before = {n: handler for n in SIGNALS if callable(handler := signal.getsignal(n))}
    deferred: list[int] = []
    module: Any = signal
    install = signal.signal

    def on_signal(number: int, frame: FrameType | None) -> None:
        deferred.append(number)
        for signal_number in before:
            install(signal_number, second_signal_handler(signal_number))

    def install_others(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in SIGNALS else install(number, handler)

    try:
        for number in before:
            install(number, on_signal)
        module.signal = install_others
        yield
    finally:
        module.signal = install
        for number, handler in before.items():
            install(number, handler)
        if deferred:
            signal.raise_signal(deferred[0])
