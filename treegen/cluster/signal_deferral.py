"""Signals that wait until Ray is through with what it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from treegen.common.signals import SIGNALS, second_signal_handler


@contextmanager
def defer_signals() -> Iterator[None]:
    """Hold the first of SIGNALS until the end; then its handler is called as ever.

    A handler that raises in the midst of Ray's calls has its exception turned into another one, and
    leaves Ray half started. Ray's own handlers, which it puts in place of ours, end the process.
    A second signal ends the process, so that nobody waits for what does not end
    (`second_signal_handler`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays so, and what ends the process at once does so.
    before = {n: handler for n in SIGNALS if callable(handler := signal.getsignal(n))}
    held: list[int] = []
    module: Any = signal
    install = signal.signal

    def on_signal(number: int, frame: FrameType | None) -> None:
        held.append(number)
        for each in before:
            install(each, second_signal_handler(each))

    def not_these(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in SIGNALS else install(number, handler)

    try:
        for number in before:
            install(number, on_signal)
        module.signal = not_these
        yield
    finally:
        module.signal = install
        for number, handler in before.items():
            install(number, handler)
        if held:
            signal.raise_signal(held[0])
