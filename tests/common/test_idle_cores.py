"""The number of threads: physical cores that are idle, unless the user or a stored run says it."""

import os
import time
from pathlib import Path

import pytest
import torch

from treegen.common import cores
from treegen.common.cores import count_idle_cores, set_threads


def write_machine(root: Path, siblings: dict[int, str]) -> None:
    for core, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    (root / "proc").mkdir()


def write_times(root: Path, busy: dict[int, int], idle: dict[int, int]) -> None:
    lines = [f"cpu{core} {busy[core]} 0 0 {idle[core]} 0 0 0 0 0 0" for core in busy]
    (root / "proc/stat").write_text("\n".join(["cpu 1 2 3 4", *lines, "intr 5"]) + "\n")


@pytest.mark.parametrize(
    ("siblings", "busy", "expected"),
    [
        (["0", "1", "2", "3"], [0, 0, 0, 0], 4),
        (["0", "1", "2", "3"], [20, 20, 0, 0], 2),
        (["0", "1", "2", "3"], [20, 20, 20, 20], 1),
        (["0", "1", "2", "3"], [2, 2, 2, 2], 4),
        (["0-1", "0-1", "2-3", "2-3"], [0, 0, 0, 0], 2),
        (["0-1", "0-1", "2-3", "2-3"], [20, 0, 20, 0], 1),
    ],
)
def test_idle_physical_cores_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    siblings: list[str],
    busy: list[int],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(busy))))
    write_machine(tmp_path, dict(enumerate(siblings)))
    write_times(tmp_path, dict.fromkeys(range(4), 100), dict.fromkeys(range(4), 100))

    def pass_time(_: float) -> None:
        write_times(
            tmp_path,
            {core: 100 + ticks for core, ticks in enumerate(busy)},
            {core: 120 - ticks for core, ticks in enumerate(busy)},
        )

    monkeypatch.setattr(time, "sleep", pass_time)
    assert count_idle_cores(tmp_path) == expected


def test_without_the_kernels_counts_all_cores_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert count_idle_cores(tmp_path, seconds=0) == 3


def test_the_number_is_chosen_once_and_what_a_user_says_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    was_set = cores._has_chosen.is_set()
    cores._has_chosen.clear()
    monkeypatch.setattr(cores, "count_idle_cores", lambda: 3)
    monkeypatch.setattr(cores, "count_cores", torch.get_num_threads)
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert set_threads() == before
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        assert set_threads() == 3
        assert set_threads("2") == 3  # it is chosen once
        cores._has_chosen.clear()
        assert set_threads("2") == 2
    finally:
        torch.set_num_threads(before)
        cores._has_chosen.set() if was_set else cores._has_chosen.clear()
