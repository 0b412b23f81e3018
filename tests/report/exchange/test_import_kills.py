"""Imports that are killed at any moment: no half run, nothing lost, and the next import works."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from foreign_logs import generated_rows, write_lm_eval
from report_cases import content, make_run

from treegen.report.exchange import import_log
from treegen.report.load import load_run


def killed(log: Path, out: Path, seconds: float) -> bool:
    """Import in a process of its own and kill that after some time; whether it was still there."""
    child = os.fork()
    if not child:
        try:
            import_log(log, out)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def check(log: Path, out: Path) -> None:
    """Nothing is a run but what is whole, and what a kill has left hinders nobody."""
    found = [file.parent for file in out.glob("*/run.json")]
    for run in found:
        assert load_run(run).num_done == 40 and not load_run(run).notices
    for place in out.glob("*"):
        names = {path.name for path in place.iterdir()}
        # Killed between the first file and run.json, the last: its files stay, and are told of.
        if place not in found and any(not name.startswith(".import.") for name in names):
            shutil.rmtree(place)
    if len(found) < 2:
        for run in found:
            shutil.rmtree(run)
        assert len(import_log(log, out)) == 2
    for run in out.glob("*"):
        assert load_run(run).num_done == 40 and not list(run.glob(".import*"))


def kill_often(folder: Path, times: int, seed: int) -> None:
    rows = generated_rows(40, filters=("strict",))
    log = write_lm_eval(folder / "log", {"one": rows, "two": rows})
    make_run(folder / "runs" / "mine", num_problems=2, num_samples=1)
    before = content(folder / "runs")
    begin = time.monotonic()
    import_log(log, folder / "first")
    whole = time.monotonic() - begin
    rng, num_killed = random.Random(seed), 0
    for number in range(times):
        out = folder / str(number)
        num_killed += killed(log, out, rng.random() * 1.2 * whole)
        check(log, out)
        shutil.rmtree(out)
    assert num_killed > times // 4
    assert content(folder / "runs") == before


def test_killed_imports(tmp_path: Path) -> None:
    kill_often(tmp_path, 12, 0)


@pytest.mark.soak
def test_many_killed_imports(tmp_path: Path) -> None:
    kill_often(tmp_path, 300, 1)
