"""A hundred kills at random moments, of workers and of the command that deals them work."""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_cases import assert_same_samples, results_of
from processes import descendants, living

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]
KILLS = int(os.environ.get("TREEGEN_TEST_KILLS", "100"))
SEED = int(os.environ.get("TREEGEN_TEST_SEED", "0"))
EVAL = shlex.split(
    "eval gsm8k --num-fewshot 1 -L 8 -n 100 --max-tokens 40 -q --memory 4MiB -b 6 --dtype float32"
)
LAST = 120.0  # seconds for what Ray has started to end; two of its helpers wait for a minute


class Ordeal:
    """Commands one after another that do a run, and what was killed of them."""

    def __init__(self, model: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.seen: set[tuple[int, int]] = set()
        self._command = [sys.executable, "-m", "treegen", *EVAL, "-M", str(model)]

    def undisturbed(self, path: Path) -> None:
        """Do a run with one worker, in peace."""
        subprocess.run(
            [*self._command, "--workers", "1", "-o", path], check=True, capture_output=True
        )

    def command(self, path: Path) -> int:
        """Begin a run or go on with it, and kill as long as it lasts; returns the exit code."""
        workers = str(self.chance.randint(1, 4))
        with open(f"{path}.err", "wb") as err:
            command = [*self._command, "--workers", workers, "-o", str(path), "--resume"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
            while process.poll() is None and self.killed.total() < KILLS:
                self._pause(process, path / "samples.jsonl")
                self._kill_some(process)
            code = process.wait()
        error = Path(f"{path}.err").read_text()
        assert "Traceback" not in error, error
        # Of so many deaths in a row, workers may be given up, or problems suspected.
        expected = {0: "", 1: "--resume", 2: "no worker is left", -9: ""}
        assert code in expected and expected[code] in error, (code, error)
        return code

    def _pause(self, process: "subprocess.Popen[bytes]", samples: Path) -> None:
        """Wait, in half of the cases until something was stored, and then a little."""
        before = _size(samples)
        if self.chance.random() < 0.5:
            while process.poll() is None and _size(samples) <= before:
                time.sleep(0.01)
            time.sleep(self.chance.expovariate(1 / 0.3))
        else:  # at any moment, loading included
            time.sleep(self.chance.uniform(0, 6))

    def _kill_some(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the command, or one or several of its workers, whatever they are doing."""
        below = descendants(process.pid)
        self.seen |= below.keys()
        workers = sorted(who for who, name in below.items() if name.startswith("ray::Worker"))
        if self.chance.random() < 0.1:
            self.killed["command"] += process.poll() is None
            process.kill()
        elif workers:
            count = self.chance.choice([1, 1, 1, 2, len(workers)])
            for pid, _ in self.chance.sample(workers, min(count, len(workers))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed["worker"] += 1


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@pytest.mark.timeout(7200)
def test_after_a_hundred_kills_nothing_is_lost_and_nothing_is_there_twice(
    tiny: Path, tmp_path: Path
) -> None:
    shared = set(os.listdir("/dev/shm"))
    ordeal, whole = Ordeal(tiny, seed=SEED), tmp_path / "whole"
    ordeal.undisturbed(whole)
    runs = 0
    while ordeal.killed.total() < KILLS:
        path = tmp_path / f"run-{runs}"
        while ordeal.command(path) != 0:
            pass
        assert_same_samples(path, whole)
        assert results_of(path)["report"] == results_of(whole)["report"]
        runs += 1
    assert KILLS < 50 or min(ordeal.killed["worker"], ordeal.killed["command"]) > 0, ordeal.killed
    deadline = time.monotonic() + LAST
    while left := ordeal.seen & living().keys():
        assert time.monotonic() < deadline, f"processes of Ray are left: {left}"
        time.sleep(0.5)
    assert set(os.listdir("/dev/shm")) <= shared
