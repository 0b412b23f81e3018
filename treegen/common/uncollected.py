"""Large results are read without a look at them by Python's collector of cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cycles of objects where they are meanwhile.

    What is read of a run is millions of objects without a cycle. The collector would go through all
    of them each time that they have become a quarter more, which takes a quarter of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
