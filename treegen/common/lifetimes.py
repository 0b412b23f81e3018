"""Objects that a `with` block closes, objects in a model's memory, and the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, Self, TypeVar
from weakref import WeakMethod

from treegen.errors import InputError

_T = TypeVar("_T")
_Args = ParamSpec("_Args")


class Closeable(ABC):
    """An object that is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End the object and free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ClosedWhenCollected(Closeable):
    """An object that is also closed when it is collected as garbage.

    While Python exits, it is left alone: modules that `close` needs may be gone.
    """

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


class CloseableRun(Closeable):
    """A run of a model. Collections of garbage leave out what is older than its `with` block.

    A full collection traverses all objects of torch and transformers, which takes 0.2 to 0.5 s,
    and a run creates enough objects to start several of them. Outside a `with` block, nothing
    changes: the cycles of an abandoned run must be found.
    """

    _with_blocks: ExitStack | None = None

    def __enter__(self) -> Self:
        self._with_blocks = self._with_blocks or ExitStack()
        self._with_blocks.enter_context(freeze_gc())
        return self

    def __exit__(self, *error: object) -> None:
        with self._with_blocks or ExitStack():  # `ExitStack.push` calls only this method
            self.close()


def call_weakly(method: Callable[_Args, _T]) -> Callable[_Args, _T | None]:
    """Return a function that calls a bound method, and does not keep its object alive.

    Once the object is gone, the function does nothing.
    """
    reference = WeakMethod(method)

    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _T | None:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call


@contextmanager
def use_context_value(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Set a context variable until the end of a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def use_environment_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable until the end of a `with` block, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


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
    gc.set_threshold(_RAISED_THRESHOLD)


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

    They are collected less often than by default: the many samples and nodes of a run stay.
    Plots, for example, contain cycles. Inside, they are collected without traversing a large run.
    Cycles in frozen objects pile up if a program spends all of its time in such blocks. So a full
    collection follows a block now and then, and takes at most a fiftieth of the time.
    """
    _freezer.enter()
    try:
        yield
    finally:
        _freezer.exit()


def collect_garbage() -> None:
    """Run a full collection that includes the objects that open blocks exclude.

    `gc.collect` does not find a run whose block was abandoned in a cycle of references: the block
    is still open, and excludes the cycle.
    """
    _freezer.collect()


class _Freezer:
    """Freezes the objects of the process while any block needs it, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the finalizer of an object may begin a block
        self._num_blocks = 0
        self._is_frozen_by_program = False
        self._threshold = gc.get_threshold()  # before the outermost block
        self._entered = self._seconds = 0.0  # seconds in blocks since the last full collection
        self._collection_seconds = 0.5

    def enter(self) -> None:
        """Begin a block; freeze the existing objects if it is the outermost one."""
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks > 1 or self._is_frozen_by_program:
                return
            # Counting many frozen objects is slow, and programs freeze their objects for good.
            self._is_frozen_by_program = gc.get_freeze_count() > _FROZEN_BY_PYTHON
            if not self._is_frozen_by_program:
                gc.freeze()
                self._threshold = gc.get_threshold()
                if 0 < self._threshold[0] < _RAISED_THRESHOLD:
                    gc.set_threshold(_RAISED_THRESHOLD, *self._threshold[1:])
                self._entered = time.perf_counter()

    def exit(self) -> None:
        """End a block; unfreeze the objects if it was the last one."""
        with self._lock:
            self._num_blocks -= 1
            if self._num_blocks or self._is_frozen_by_program:
                return
            gc.unfreeze()
            if gc.get_threshold()[0] == _RAISED_THRESHOLD:  # the program did not set its own
                gc.set_threshold(*self._threshold)
            now = time.perf_counter()
            self._seconds += now - self._entered
            interval = _COLLECTION_INTERVAL * self._collection_seconds
            if not gc.isenabled() or self._seconds <= interval:
                return
            self._seconds = 0.0
        gc.collect()  # without the lock, because a finalizer may wait for a thread in `enter`
        self._collection_seconds = time.perf_counter() - now

    def collect(self) -> None:
        """Run a full collection without exclusions."""
        with self._lock:
            if self._num_blocks and not self._is_frozen_by_program:
                gc.unfreeze()
        gc.collect()
        with self._lock:
            if self._num_blocks and not self._is_frozen_by_program:
                gc.freeze()


_RAISED_THRESHOLD: Final = 50_000  # new objects until the youngest ones are collected
_FROZEN_BY_PYTHON: Final = 1_000  # Python 3.12 starts with 375 frozen objects
_COLLECTION_INTERVAL: Final = 50  # between full collections, in multiples of their duration
_freezer: Final = _Freezer()
