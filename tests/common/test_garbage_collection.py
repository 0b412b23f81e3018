"""What Python's collector of cycles is spared is what was read, and nothing for good."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model

from treegen import LLM, Node, SamplingParams
from treegen.common import lifetimes
from treegen.common.lifetimes import CloseableRun, collect_garbage, freeze_gc, pause_gc


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unfreeze what the tests themselves have frozen."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setattr(lifetimes, "_freezer", lifetimes._Freezer())
    yield
    if frozen:
        gc.freeze()


def test_what_was_read_counts_as_old() -> None:
    with pause_gc():
        made = [[number] for number in range(200_000)]
    assert not any(each is made[-1] for young in (0, 1) for each in gc.get_objects(young))
    assert any(each is made[-1] for each in gc.get_objects(2))
    assert not gc.get_freeze_count()


def test_objects_that_a_program_has_frozen_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counting takes a tenth of a second where much is frozen, and small runs are very frequent."""
    with freeze_gc():
        pass
    gc.freeze()
    with freeze_gc():
        pass
    assert gc.get_freeze_count() > 10_000
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("they were counted again"))
    with freeze_gc():
        pass


def test_objects_that_python_has_frozen_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with 375 frozen objects."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    with freeze_gc():
        pass
    assert frozen == [1]


class Run(CloseableRun):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_block_of_a_run_leaves_out_older_objects_and_nothing_else() -> None:
    run, other = Run(), Run()
    before = gc.get_freeze_count()
    with run:
        assert gc.get_freeze_count() > 10_000
        with pytest.raises(ZeroDivisionError), other, other:
            assert gc.get_freeze_count() > 10_000
            raise ZeroDivisionError
        assert gc.get_freeze_count() > 10_000
    assert (run.closed, other.closed, gc.get_freeze_count()) == (1, 2, before)


def test_a_run_that_an_exit_stack_was_given_is_closed() -> None:
    run = Run()
    with ExitStack() as stack:
        stack.push(run)
    assert run.closed == 1


def test_cycles_between_blocks_are_collected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks reset the counts that start a collection, so a loop of runs would never have one."""
    collected: list[float] = []
    now = 0.0

    def collect() -> None:
        nonlocal now
        now += 0.25
        collected.append(now)

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for _ in range(100):
        with freeze_gc(), freeze_gc():
            now += 2
    # The first interval is 50 times half a second, the others 50 times a quarter of a second.
    assert len(collected) == 13
    gc.disable()
    try:
        for _ in range(100):
            with freeze_gc():
                now += 2
    finally:
        gc.enable()
    assert len(collected) == 13


def test_blocks_collect_less_often_and_restore_the_threshold() -> None:
    before = gc.get_threshold()
    try:
        for first, inside in ((700, 50_000), (0, 0), (80_000, 80_000)):
            gc.set_threshold(first, 7, 8)
            with freeze_gc(), freeze_gc():
                assert gc.get_threshold()[:2] == (inside, 7)
            assert gc.get_threshold()[:2] == (first, 7)
        with freeze_gc():
            gc.set_threshold(900, 9, 9)
        assert gc.get_threshold()[:2] == (900, 9), "the program has set its own"
    finally:
        gc.set_threshold(*before)


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


_OPEN = """
import sys
from treegen import LLM, Node, SamplingParams

llms = [LLM(sys.argv[1], device="cpu", memory="4MiB", check=False) for _ in range(4)]
scores = llms[0].score_stream([([1, 2, 3], [4, 5])])
session = llms[1].session()
root = session.root([1, 2, 3])
live = llms[2].open_live_run()
stream = llms[3].stream(Node("a", samples=2), SamplingParams(max_tokens=4))
next(stream)
"""


def test_runs_that_are_open_when_the_process_ends_print_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _OPEN, str(save_tiny_model(tmp_path))]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr


class Holder:
    """An object with a generator whose frame refers to the object."""

    def open(self, run: Any) -> Iterator[Any]:
        with run:
            yield from run

    def hold(self, run: Any) -> None:
        self.results = self.open(run)
        next(self.results)


def test_an_llm_is_free_again_after_a_block_that_was_abandoned_in_a_cycle(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_model(tmp_path)), device="cpu", memory="4MiB")
    Holder().hold(llm.stream(Node("a", samples=2), SamplingParams(max_tokens=4)))
    assert len(llm.generate(["b"], SamplingParams(max_tokens=4))) == 1
    assert not gc.get_freeze_count()


def test_cycles_that_are_older_than_an_open_block_are_found() -> None:
    holder = Holder()
    holder.results = iter([holder])
    known = weakref.ref(holder)
    with Run():
        del holder
        gc.collect()
        assert known()
        collect_garbage()
        assert known() is None and gc.get_freeze_count() > 10_000


def test_a_finalizer_may_wait_for_a_thread_that_begins_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[bool] = []

    def collect() -> None:
        thread = threading.Thread(target=lifetimes._freezer.enter, daemon=True)
        thread.start()
        thread.join(10)
        begun.append(not thread.is_alive())

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(lifetimes, "_COLLECTION_INTERVAL", 0)
    with freeze_gc():
        pass
    assert begun == [True]
