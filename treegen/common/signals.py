"""Handlers of signals that end a process, and the end of a process whose parent has ended.

A first signal asks a loop to stop, a second signal ends the process.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

# Sent by Ctrl-C, by `kill`, and when a terminal is closed.
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_RACE: Final = re.compile(r"Signal (\d+) ignored due to race condition")


def second_signal_handler(signum: int) -> signal.Handlers:
    """Return the handler for a second signal, for `signal.signal`: it ends the process.

    A second SIGHUP is ignored, because a closed terminal sends two: one through the shell, and one
    when the shell has ended.
    """
    return signal.SIG_IGN if signum == signal.SIGHUP else signal.SIG_DFL


def handle_racing_signal() -> None:
    """Apply `second_signal_handler` to a second signal that arrives together with the first.

    Python finds no handler for such a signal any more, and would print a traceback about the race.
    """
    previous_hook = sys.unraisablehook
    match_race = _RACE.match  # a local name, because the module's names are gone at exit

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        match = match_race(str(unraisable.exc_value))
        if match is None:
            previous_hook(unraisable)
        elif signal.getsignal(int(match[1])) is signal.SIG_DFL:
            os.kill(os.getpid(), int(match[1]))

    sys.unraisablehook = hook


NOTHING_DRAWN: Final = "no new sample was drawn; repeat the same command"
"""The note on an interrupt that arrives before a command starts to draw samples."""


@contextmanager
def note_on_interrupt(note: str) -> Iterator[None]:
    """Add a note to an interrupt that has none, so that its message says what to do."""
    try:
        yield
    except BaseException as stopped:
        if not isinstance(stopped, Exception) and not getattr(stopped, "__notes__", ()):
            stopped.add_note(note)
        raise


class StopFlag:
    """The signal that asked the process to stop, or None. Loops call the flag to poll it."""

    __slots__ = ("_signum",)

    def __init__(self) -> None:
        self._signum: int | None = None

    def __call__(self) -> int | None:
        """Return the number of the first signal that arrived; None if none has."""
        return self._signum

    def set(self, signum: int) -> None:
        """Record `signum`, unless a signal is recorded already."""
        if self._signum is None:
            self._signum = signum


@contextmanager
def graceful_signals() -> Iterator[StopFlag]:
    """Yield a flag that the first of `SIGNALS` sets; a second one ends the process.

    What the second signal does is set by `second_signal_handler`. At the end the previous handlers
    are restored, and the flag keeps its value. A signal that the process was started to ignore
    (nohup, a background job) stays ignored. Outside the main thread, where Python allows no
    handlers, nothing is installed and the flag is never set.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    # getsignal returns None for a handler that was not installed from Python. It could not be
    # restored, so it is not replaced.
    previous = {
        s: handler
        for s in SIGNALS
        if (handler := signal.getsignal(s)) is not None and handler is not signal.SIG_IGN
    }

    def on_signal(signum: int, frame: FrameType | None) -> None:
        flag.set(signum)
        handle_racing_signal()
        for s in previous:
            signal.signal(s, second_signal_handler(s))

    try:
        for s in previous:
            signal.signal(s, on_signal)
        yield flag
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


_POLL_SECONDS: Final = 1.0


def exit_with_parent(parent: int) -> None:
    """Start a thread that ends this process within about a second after its parent has ended.

    Args:
        parent: Id of the process that started this one.
    """
    threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()


def _exit_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
