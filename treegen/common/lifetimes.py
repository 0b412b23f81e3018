"""Objects that a `with` block closes, objects in a model's memory, and the garbage collector."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Self, TypeVar

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
            f"a {type(self).__name__} cannot be pickled, because it belongs to a model in "
            "memory; store its key, path_text or data, or store the records of the tree "
            "(SearchTree, SearchResult)"
        )


# With fewer new objects, moving them to the oldest generation costs more than collecting them.
_MIN_MOVED_OBJECTS: Final = 100_000


def raise_gc_threshold() -> None:
    """Collect garbage less often, in a process that treegen has started.

    Imports create many objects that stay. With the default threshold, they take a quarter longer.
    """
    gc.set_threshold(50_000)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector inside.

    Reading a run creates millions of objects without cycles. The collector would traverse all of
    them each time that their number has grown by a quarter, which takes a quarter of the time. It
    does not traverse them soon afterwards either: if they are many, they are moved to the oldest
    generation. They are not frozen when the process ends, because frozen objects are never
    finalized, and extension modules made with nanobind, such as Triton's, report them as leaks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _MIN_MOVED_OBJECTS:
                with freeze_gc():
                    pass
            gc.enable()


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude the existing objects from collections inside the block; newer ones are collected.

    Plots, for example, contain cycles. Inside, they are collected without traversing a large run.
    """
    is_outermost = not gc.get_freeze_count()  # the program may have frozen its objects for good
    if is_outermost:
        gc.freeze()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()
