"""Ranks that are forked from the test's own process instead of started.

The imports of a rank that is started take several seconds, those of a forked one nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from treegen.model import rank_processes
from treegen.model.rank_processes import RankGroup

import_module("treegen.llm.follower")  # forked processes have imported it then


class ForkedPython:
    """A replacement for `subprocess.Popen` of `python -c CODE` that runs the code in a fork."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], process_group: int, **_: Any
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        self._lock = threading.Lock()
        with warnings.catch_warnings():
            # Other threads of this process wait, and hold no locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            _execute(command, env, process_group)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _execute(command: Sequence[str], env: Mapping[str, str], process_group: int) -> None:
    """Run the code of a command in this process, and end it."""
    code = 1
    try:
        os.setpgid(0, process_group)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(env)
        dist.distributed_c10d._world.group_count = 0  # as in a new process
        at = command.index("-c")
        sys.argv = ["-c", *command[at + 2 :]]
        exec(command[at + 1], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """While open, ranks are forked."""
    named = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "subprocess", SimpleNamespace(Popen=ForkedPython, **named))
        yield


@contextmanager
def forked_group(size: int) -> Iterator[RankGroup]:
    """Yield a group of ranks on the CPU; this process is the first, and forks the others."""
    with forked_ranks():
        group = RankGroup(size, "cpu")
    with group:
        yield group
