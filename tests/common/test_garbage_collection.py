"""What Python's collector of cycles is spared is what was read, and nothing for good."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from treegen.common.lifetimes import freeze_gc, pause_gc


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Unfreeze what the tests themselves have frozen."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_what_was_read_counts_as_old() -> None:
    with pause_gc():
        made = [[number] for number in range(200_000)]
    assert not any(each is made[-1] for young in (0, 1) for each in gc.get_objects(young))
    assert any(each is made[-1] for each in gc.get_objects(2))
    assert not gc.get_freeze_count()


def test_what_is_frozen_is_not_counted_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of a second where much is frozen, and small runs are read very often."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it was counted"))
    gc.collect()
    with pause_gc():
        made = [[number] for number in range(100)]
    assert gc.isenabled() and made


def test_what_is_set_apart_is_left_alone_and_newer_cycles_are_not() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    with pause_gc():
        old = weakref.ref(Cycle())
        with freeze_gc(), freeze_gc():
            new = weakref.ref(Cycle())
            gc.collect()
            assert old() is not None and new() is None
    assert not gc.get_freeze_count()
    gc.collect()
    assert old() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with pause_gc(), freeze_gc():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_collecting_goes_on_as_it_was() -> None:
    with pause_gc(), pause_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


_CYCLE = """
import os
from treegen.common.lifetimes import pause_gc

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self, write=os.write):
        write(1, b"finalized")

with pause_gc():
    made = [[number] for number in range(200_000)]
left = Cycle()
"""


def test_objects_are_finalized_when_the_process_ends() -> None:
    """Otherwise extension modules made with nanobind print that their types leak."""
    done = subprocess.run([sys.executable, "-c", _CYCLE], capture_output=True, check=True)
    assert done.stdout == b"finalized"
