"""What counts as a wait that is too long."""

import time

import pytest

from treegen.llm.cluster.worker_pool import PATIENCE, WaitTimer


def test_time_counts_in_which_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    waiting = WaitTimer()
    looks = 0
    while not waiting.has_timed_out(goes_on=True):
        now[0] += 1.0
        looks += 1
    assert PATIENCE < looks <= PATIENCE + 2
    assert not waiting.has_timed_out(goes_on=False)
    now[0] += 1.0
    assert not waiting.has_timed_out(goes_on=True)


def test_a_process_that_was_stopped_itself_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    waiting = WaitTimer()
    for _ in range(3):
        now[0] += 6 * PATIENCE
        assert not waiting.has_timed_out(goes_on=True)
