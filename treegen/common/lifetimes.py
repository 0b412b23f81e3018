"""Objects that a `with` block closes, and objects that live in a model's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from treegen.errors import InputError

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


class NonCopyable:
    """An object whose copy is the object itself, and whose pickling raises an error with advice.

    Libraries that copy their states, such as controllers of searches, may store nodes in them. A
    real copy of a node would copy its session, its cache and its model. Nodes are the exception:
    they are pickled by their keys.
    """

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            f"a {type(self).__name__} cannot be pickled: it lives in the memory of a model. Keep "
            "its key, path_text or data, or the records of its tree (SearchTree, SearchResult)"
        )
