"""What counts as a wait that is too long."""

import time

import pytest

from treegen.cluster.waiting import PATIENCE, Waiting


def test_time_counts_in_which_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    waiting = Waiting()
    looks = 0
    while not waiting.is_long(goes_on=True):
        now[0] += 1.0
        looks += 1
    assert PATIENCE < looks <= PATIENCE + 2
    assert not waiting.is_long(goes_on=False)
    now[0] += 1.0
    assert not waiting.is_long(goes_on=True)


def test_a_process_that_was_stopped_itself_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    waiting = Waiting()
    for _ in range(3):
        now[0] += 6 * PATIENCE
        assert not waiting.is_long(goes_on=True)
