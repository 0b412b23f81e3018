"""Objects that a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self, TypeVar

_T = TypeVar("_T")


class Closeable(ABC):
    """An object that is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End the object and free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def use_context_value(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable until the end of a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
