"""A signal while Ray is busy waits for it, and ends the command as ever."""

import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import pytest

from treegen import Cluster
from treegen.common.signals import SIGNALS, second_signal_handler
from treegen.llm.cluster.ray_session import defer_signals
from treegen.llm.cluster.worker_pool import WorkerPool, WorkerSlot


class _Stopped(BaseException):
    pass


@pytest.fixture(params=SIGNALS, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises, as those of commands do."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    before = signal.signal(request.param, stop)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_waits_for_the_end(number: signal.Signals) -> None:
    done = []
    with pytest.raises(_Stopped), defer_signals():
        with defer_signals():
            signal.raise_signal(number)
        done.append("the rest")
    assert done


def test_handlers_of_others_are_not_taken(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(_Stopped), defer_signals():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_second_signal_has_its_default_action(number: signal.Signals) -> None:
    with pytest.raises(_Stopped), defer_signals():
        signal.raise_signal(number)
        assert signal.getsignal(number) is second_signal_handler(number)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize("number", [signal.SIGTERM], indirect=True)
def test_workers_that_load_are_stopped_by_it(
    number: signal.Signals, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would make another exception of that of the handler."""
    begin = WorkerPool.begin

    def beginning(pool: WorkerPool, slot: WorkerSlot) -> None:
        begin(pool, slot)
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()

    monkeypatch.setattr(WorkerPool, "begin", beginning)
    with pytest.raises(_Stopped):
        Cluster(str(tiny), workers=1)
    import ray

    assert not ray.is_initialized()
