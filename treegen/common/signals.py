"""The first of some signals asks a loop to stop; the second ends the process."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

# Ctrl-C, what `kill` sends, and a terminal that was closed.
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_RACE: Final = re.compile(r"Signal (\d+) ignored due to race condition")


def second_signal_handler(signum: int) -> signal.Handlers:
    """Return what a second signal does, for `signal.signal`: it ends the process.

    But SIGHUP does nothing any more. For a terminal that is closed sends two of them: one by way of
    the shell, and one when the shell has ended.
    """
    return signal.SIG_IGN if signum == signal.SIGHUP else signal.SIG_DFL


def expect_second() -> None:
    """Let a second signal that came together with the first do what `second_signal_handler` says.

    Python finds it among those to handle once it has no handler any more, and tells of that race
    with a traceback.
    """
    before = sys.unraisablehook

    def hook(told: "sys.UnraisableHookArgs") -> None:
        found = _RACE.match(str(told.exc_value))
        if found is None:
            before(told)
        elif signal.getsignal(int(found[1])) is signal.SIG_DFL:
            os.kill(os.getpid(), int(found[1]))

    sys.unraisablehook = hook


class StopFlag:
    """The signal that asked the process to stop, or None. Loops call it to poll."""

    __slots__ = ("_signum",)

    def __init__(self) -> None:
        self._signum: int | None = None

    def __call__(self) -> int | None:
        """Return the number of the first signal that came; None while none has."""
        return self._signum

    def set(self, signum: int) -> None:
        """Note `signum`, unless one is noted already."""
        if self._signum is None:
            self._signum = signum


@contextmanager
def graceful_signals() -> Iterator[StopFlag]:
    """Yield a flag that the first of `SIGNALS` sets; a second one ends the process
    (`second_signal_handler`).

    At the end the previous handlers are put back, and the flag keeps its value. A signal that the
    process was started to ignore (nohup, a background job) stays ignored. Outside the main thread,
    where Python allows no handlers, nothing is installed and the flag is never set.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    # getsignal gives None for a handler that was not installed from Python. It could not be put
    # back, so it stays.
    previous = {
        s: handler
        for s in SIGNALS
        if (handler := signal.getsignal(s)) is not None and handler is not signal.SIG_IGN
    }

    def on_signal(signum: int, frame: FrameType | None) -> None:
        flag.set(signum)
        expect_second()
        for s in previous:
            signal.signal(s, second_signal_handler(s))

    try:
        for s in previous:
            signal.signal(s, on_signal)
        yield flag
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
