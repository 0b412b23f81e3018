"""Jobs that can be killed, each in a process forked from one that has imported everything.

So a start costs a tenth of a second instead of seven.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

_PATH = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"


class ForkServer(AbstractContextManager["ForkServer"]):
    """Starts jobs one at a time, each in a fork of a process that runs some code.

    Args:
        code: Code that calls `serve`.
        arguments: Arguments of the code.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PATH + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, job: object) -> int:
        """Start a job and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._number("pid")

    def wait(self) -> int:
        """Return the exit code of the job that was started; a signal's is negative."""
        return self._number("code")

    def run(self, job: object, kill_after: float | None = None) -> int:
        """Run a job, kill it after some seconds, and return its exit code."""
        pid = self.start(job)
        if kill_after is not None:
            time.sleep(kill_after)
            with suppress(ProcessLookupError):  # it has ended already
                send(pid, signal.SIGKILL)
        return self.wait()

    def _number(self, kind: str) -> int:
        """The number of the next line, which must be of that kind.

        A test that failed between a start and its `wait` has left the code of its job.
        """
        found, _, number = self._read().partition(" ")
        while kind == "pid" and found == "code":
            found, _, number = self._read().partition(" ")
        assert found == kind, f"the server told its {found}, not its {kind}"
        return int(number)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server died"
        return line.strip()


def serve(run: Callable[[Any], object]) -> None:
    """Run each job of the standard input in a fork, and tell its process id and its exit code."""
    _tell("ready")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(json.loads(line))
            os._exit(0)
        _tell(f"pid {pid}")
        _tell(f"code {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


def send(pid: int, number: int) -> None:
    """Send a signal to one process: 0 and below are groups, and 1 is the first of all."""
    assert pid > 1
    os.kill(pid, number)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
