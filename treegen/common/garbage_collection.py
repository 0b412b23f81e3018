"""Large results are read without a look at them by Python's collector of cycles."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Fewer new objects than these are gone through in less time than it takes to count what is frozen.
_MANY: Final = 10_000


@contextmanager
def pause_gc() -> Iterator[None]:
    """Leave cycles of objects where they are meanwhile.

    What is read of a run is millions of objects without a cycle. The collector would go through all
    of them each time that they have become a quarter more, which takes a quarter of the time. Nor
    does it go through them at the end, for they then count as old, if they are many, or when the
    process ends.
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
    """Leave the objects that there are now out of collections meanwhile; newer ones are collected.

    So what is made of a large run may have cycles, such as pictures, and they do not pile up.
    """
    mine = not gc.get_freeze_count()  # a program may have frozen its own for good
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
