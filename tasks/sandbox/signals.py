"""Signals that end the processes of a sandbox, and which of them say nothing about the sandbox."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import TypeVar

from treegen.tasks.sandbox.programs import HelperKilledError

_T = TypeVar("_T")
_ATTEMPTS = 3
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""Signals that a user, a supervisor or the kernel's out-of-memory killer sends. A sandbox that does
not work ends its helper by other signals, such as SIGSYS."""


def signal_of(code: int) -> int:
    """Return the signal that ended a process; 0 if it ended by itself.

    Args:
        code: Return code from `subprocess`. bwrap adds 128 to the signal that ended its child.
    """
    return -code if code < 0 else max(code - 128, 0)


def name_of(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def unless_killed(check: Callable[[], _T]) -> _T:
    """Return the result of a check, and repeat the check if something kills its processes.

    Raises:
        HelperKilledError: The processes were killed each time.
        SandboxError: The sandbox does not hold, or does not work here.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(HelperKilledError):
            return check()
    try:
        return check()
    except HelperKilledError as error:
        reason = str(error).partition(";")[0]
        raise HelperKilledError(
            f"no sandbox can be tried here: {reason}, and so were those before it; find out what "
            "ends processes here (the kernel's out-of-memory killer writes to dmesg), and try again"
        ) from error
