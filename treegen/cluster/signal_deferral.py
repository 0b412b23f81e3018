"""Defers signals until a call of Ray has returned."""

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
