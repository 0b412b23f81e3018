"""Pauses Python's garbage collector while large results are read."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Collecting fewer new objects than this takes less time than counting the frozen ones.
_MANY: Final = 10_000


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector inside.

    Reading a run creates millions of objects without cycles. The collector would traverse all of
    them each time that their number has grown by a quarter, which takes a quarter of the time. It
    does not traverse them afterwards either: if they are many, they are moved to the oldest
    generation, and they are frozen before the process ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_count()[0] > _MANY:
                with freeze_gc():
                    pass
                atexit.unregister(gc.freeze)
                atexit.register(gc.freeze)
            gc.enable()


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude the existing objects from collections inside; newer ones are collected.

    So objects that are made from a large run may have cycles, such as plots, without piling up.
    """
    is_outermost = not gc.get_freeze_count()  # the program may have frozen its objects for good
    if is_outermost:
        gc.freeze()
    try:
        yield
    finally:
        if is_outermost:
            gc.unfreeze()
