"""A process that answers requests, each in bounded CPU time and memory.

Some code cannot be stopped from within: a match of a regular expression, a power with a billion
digits. A thread that runs it cannot be stopped either. So a separate process runs it, and stops it
after a fixed CPU time, so that an answer does not depend on how busy the machine is. If a request
does not react to that, its process is killed, and a new one takes the next request.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from treegen.errors import TreegenError

_WORKERS: "Final[weakref.WeakSet[FileWorker]]" = weakref.WeakSet()
_SERVER: Final = Path(__file__).with_name("worker_server.py")


class FileWorker:
    """A process that runs one Python file; it starts with the first request.

    Requests and answers are JSON. Threads may share a worker; their requests run one by one.

    Attributes:
        cpu_seconds: CPU time of all requests so far.
    """

    def __init__(
        self, file: Path, setup: object, *, seconds: float, memory: int, what: str, site: bool
    ) -> None:
        """Store the settings; the process starts later.

        Args:
            file: Has a function `prepare(setup)`, which returns a function from requests to
                answers.
            setup: Argument of `prepare`; JSON.
            seconds: Maximum CPU time of one request.
            memory: Bytes by which a request may grow the process's address space.
            what: What the process does, for messages: "that matches x".
            site: Whether the file imports installed packages.
        """
        self._setup = {"file": str(file), "setup": setup, "seconds": seconds, "memory": memory}
        self._what, self._site, self.cpu_seconds = what, site, 0.0
        self._lock = threading.Lock()
        self._end: Callable[[], object] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        _WORKERS.add(self)

    def ask(self, request: object) -> Any:
        """Return the answer to a request; None if it takes too much time or memory.

        Raises:
            TreegenError: The process ended or was killed, or its code fails.
        """
        return self.ask_line(json.dumps(request, ensure_ascii=False))

    def ask_line(self, request: str) -> Any:
        """Return the answer to a request that is JSON already; see `ask`.

        Args:
            request: JSON in one line.

        Raises:
            TreegenError: The process ended or was killed, or its code fails.
        """
        with self._lock:
            reply = self._exchange(self._process or self._start(), request)
            if "killed" in reply:  # by the system, not by the request, so try again
                reply = self._exchange(self._process or self._start(), request)
            # The reply for a request whose process was killed has no time.
            self.cpu_seconds += reply.get("seconds", self._setup["seconds"])
        if "killed" in reply:
            raise TreegenError(
                f"the process {self._what} was killed twice by {reply['killed']}; check `dmesg` "
                "for messages of the kernel's out-of-memory killer, and score again"
            )
        if "error" in reply:
            raise TreegenError(
                f"the process {self._what} failed: {reply['error']}; check that the package "
                "that this process uses is completely installed"
            )
        return reply["answer"]

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-IS", str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            # Threads of a numerical library would not survive the forks of the process.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._end = weakref.finalize(self, _end, process)
        self._process = process
        # The process imports the same packages as this one.
        path = [folder for folder in sys.path if folder] if self._site else None
        reply = self._exchange(process, json.dumps({**self._setup, "path": path}))
        if "error" in reply:
            self._drop()
            raise TreegenError(
                f"the process {self._what} failed to start: {reply['error']}; check that the "
                "package that this process uses is installed correctly"
            )
        return process

    def _exchange(self, process: "subprocess.Popen[bytes]", message: str) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(message.encode("utf-8", "surrogatepass") + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        except BaseException:
            # After Ctrl-C, this request's answer must not be taken for that of the next request.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._drop()
            raise
        if not line.endswith(b"\n"):
            self._drop()
            raise TreegenError(f"the process {self._what} ended; try again")
        reply: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return reply

    def _drop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def count_cpu_seconds() -> float:
    """Return the CPU time of this thread and of all requests to workers."""
    return time.thread_time() + sum(worker.cpu_seconds for worker in _WORKERS)


def end_workers() -> None:
    """End the processes of all workers, each after its request; the next request starts another."""
    for worker in list(_WORKERS):
        with worker._lock:
            worker._drop()


def _forget_all() -> None:
    """Forget all processes in a fork of this process, because they answer its parent."""
    for worker in list(_WORKERS):
        worker._lock = threading.Lock()
        worker._process = worker._end = None


os.register_at_fork(after_in_child=_forget_all)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    process.wait()
    process.stdout.close()
