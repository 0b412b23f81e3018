"""Threads that share one run: they take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from treegen.errors import InputError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Synchronized:
    """Threads may share it: while one is in a method marked `synchronized`, others wait for
    theirs.
    """

    _turn: threading.RLock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._turn = threading.RLock()
        return made


_Shared = TypeVar("_Shared", bound=Synchronized)


def synchronized(
    method: Callable[Concatenate[_Shared, _Args], _Result],
) -> Callable[Concatenate[_Shared, _Args], _Result]:
    """Mark a method as one that a single thread at a time is in."""

    @wraps(method)
    def alone(self: _Shared, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self._turn:
            return method(self, *args, **kwargs)

    return alone


class ExclusiveSection:
    """A part of an object's work that threads may not do side by side."""

    def __init__(self, what: str) -> None:
        """what: the object's name in messages."""
        self._what, self._lock = what, threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Do a part of the work; raise InputError if another thread is at it."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                f"another thread is at work with this {self._what}; use it in one thread at a time"
            )
        try:
            yield
        finally:
            self._lock.release()
