"""Signals while a command starts: the first signal ends it at once, and cleans up.

During an import, it ends the command after the import. Python and libraries swallow or wrap an
exception that is raised there, and torch ends the process.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from treegen.common.signals import SIGNALS, StopFlag, handle_racing_signal, second_signal_handler

_POLL_SECONDS: Final = 0.02
# Longer imports, such as one of a task that downloads its data, are interrupted.
_MAX_IMPORT_SECONDS: Final = 3.0

# Python drops exceptions in destructors. So long-running commands also poll this flag; otherwise
# the signal would be lost with the exception.
received: Final = StopFlag()


class Interrupted(BaseException):
    """A signal requested the end of the command. Only `main` catches it.

    It is not a KeyboardInterrupt, which click would turn into "Aborted!" and exit code 1.
    """

    def __init__(self, signum: int) -> None:
        """Record the signal's number. Notes on the exception say what is kept and what to do."""
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that shells report for a process that the signal ended."""
        return 128 + self.signum

    def __str__(self) -> str:
        stopped = f"stopped by {signal.Signals(self.signum).name}"
        return "; ".join((stopped, *getattr(self, "__notes__", ())))


@contextmanager
def raising_signals() -> Iterator[None]:
    """Make the first signal raise Interrupted; a second one ends the process at once.

    Afterwards the signals have their default action, because only the interpreter's exit remains.
    """
    deadline = 0.0

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal deadline
        received.set(signum)
        handle_racing_signal()
        _set(second_signal_handler)
        deadline = time.monotonic() + _MAX_IMPORT_SECONDS
        signal.signal(signal.SIGALRM, on_alarm)
        end_command(frame)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if _has_default_actions():  # otherwise a loop handles signals, and polls `received`
            end_command(frame)

    def end_command(frame: FrameType | None) -> None:
        if _is_importing(frame) and time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, _POLL_SECONDS)
        # Python prints and drops an exception in a destructor; the command polls `received`.
        elif frame is None or frame.f_code.co_name != "__del__":
            raise Interrupted(received() or signal.SIGINT)

    for number in SIGNALS:
        # A signal that was ignored at the start (nohup, a background job) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _set(lambda number: signal.SIG_DFL)


def _set(handler: Callable[[int], signal.Handlers]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler(number))


def _has_default_actions() -> bool:
    return all(not callable(signal.getsignal(number)) for number in SIGNALS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
