"""Judging that is killed again and again: nothing is lost, and nothing is judged twice."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judging_cases import LETTERS, rubric_file, small_run

import treegen
from treegen.evals.judging.judgement_files import FILE, FOLDER, get_slot, read_records


def command(run: Path, rubric: Path) -> list[str]:
    return [
        sys.executable,
        *shlex.split(
            f"-m treegen judge {run} --judge demo --rubric {rubric} --repeats 6 --max-tokens 24"
            " --memory 16MiB --max-rows 8 --quiet"
        ),
    ]


def said(run: Path) -> dict[object, str]:
    (folder,) = (run / FOLDER).iterdir()
    records = list(read_records(run, folder.name))
    found: dict[object, str] = {(r["problem_id"], get_slot(r)): r["text"] for r in records}
    assert len(found) == len(records)  # nothing was judged twice
    return found


def kill_and_resume(tmp_path: Path, kills: int, *, problems: int) -> None:
    rubric = rubric_file(tmp_path, LETTERS)
    whole, killed = (small_run(tmp_path / name, problems=problems) for name in ("whole", "killed"))
    subprocess.run(command(whole, rubric), check=True, capture_output=True)
    total = len(said(whole))
    assert total == problems * 3 * 2 * 6
    rng = random.Random(0)
    size = 0
    kept: dict[object, str] = {}
    for number in range(kills):
        process = subprocess.Popen(
            command(killed, rubric), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Until it has written something, and then anywhere within a line or between two.
        wanted = size + 1 + rng.randrange(max(1, 300 * total // (2 * kills)))
        while process.poll() is None:
            files = list(killed.glob(f"{FOLDER}/*/{FILE}"))
            if files and os.path.getsize(files[0]) >= wanted:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (file,) = killed.glob(f"{FOLDER}/*/{FILE}")
        if number % 3 == 1:  # a kill of the machine may tear the last line
            file.write_bytes(file.read_bytes()[: -rng.randrange(1, 40)])
        size = os.path.getsize(file)
        now = said(killed)
        assert len(kept.keys() - now.keys()) <= (number % 3 == 1)
        assert all(kept[key] == now[key] for key in kept.keys() & now.keys())
        kept = now
    subprocess.run(command(killed, rubric), check=True, capture_output=True)
    assert kept.items() <= said(killed).items()
    assert said(killed).keys() == said(whole).keys()
    assert treegen.judgings(killed).summaries[0].judged[0].judging.settings.repeats == 6


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_judging_that_is_killed_goes_on(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 1, problems=3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_judging_that_is_killed_twenty_times_loses_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 20, problems=8)
