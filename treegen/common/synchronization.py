"""Locks for threads that share one run, and results of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from treegen.errors import InputError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Synchronized:
    """An object that threads may share.

    While one thread is in a method marked `synchronized`, other threads wait for their turn.
    """

    _turn: threading.RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the object with its lock."""
        instance = super().__new__(cls)
        instance._turn = threading.RLock()
        return instance


_Shared = TypeVar("_Shared", bound=Synchronized)


def synchronized(
    method: Callable[Concatenate[_Shared, _Args], _Result],
) -> Callable[Concatenate[_Shared, _Args], _Result]:
    """Mark a method that only one thread at a time may run."""

    @wraps(method)
    def alone(self: _Shared, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self._turn:
            return method(self, *args, **kwargs)

    return alone


def set_result_of(future: Future[_Result], function: Callable[[], _Result]) -> None:
    """Store in a future what a function returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def run_in_daemon(name: str, function: Callable[[], _Result]) -> Future[_Result]:
    """Run a function in a daemon thread of this name, which the caller may abandon."""
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()  # so that a caller that leaves cannot cancel it
    work = partial(set_result_of, future, function)
    threading.Thread(target=work, name=name, daemon=True).start()
    return future


class ExclusiveSection:
    """A part of an object's work that threads must not do at the same time."""

    def __init__(self, what: str) -> None:
        """Create the section.

        Args:
            what: Name of the object in messages.
        """
        self._what, self._lock = what, threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the section; raise InputError if another thread holds it."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"another thread is using this {self._what}; use the {self._what} in only one "
                "thread at a time"
            )
        try:
            yield
        finally:
            self._lock.release()
