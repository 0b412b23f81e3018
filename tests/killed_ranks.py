"""A program that kills rank 1 of a model again and again, at moments spread over its life.

    python tests/killed_ranks.py FOLDER DEVICE FIRST LAST OF

FOLDER has a model, and DEVICE is cpu or cuda. Kills FIRST to LAST - 1 of OF are done, each with two
new ranks, and a line is printed for each one that ended with a clear error and left nothing behind.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import tiny_models
import torch

from treegen import LLM, Node, SamplingParams
from treegen.errors import WorkerError
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup

TREE = Node("Q: Ann has 3 apples.\nA:", children=[Node(f" {n}", samples=4) for n in range(3)])
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
RUN_SECONDS = 0.5  # in which kills hit runs; earlier ones hit the start, the join and the load


def followers() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def use(folder: str, device: str, seconds: float) -> None:
    """Start two ranks and use them for a while; a rank that is killed raises WorkerError."""
    with RankGroup(2, device) as group:
        model = group.load(partial(load_model, folder, dtype="float32"))
        llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="8MiB", eager=True)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                llm.run(TREE, LONG)
        except WorkerError:
            try:
                llm.run(TREE, LONG)
            except WorkerError as error:
                assert "create a new LLM" in str(error), error
            else:
                raise AssertionError("a model whose rank has died was used again") from None
            raise


def kill_at(moment: float) -> None:
    """Kill the one follower, so many seconds after it was started."""
    while not (found := followers()):
        time.sleep(0.001)
    time.sleep(moment)
    os.kill(int(found.pop()), signal.SIGKILL)


def main(folder: str, device: str, *numbers: str) -> None:
    """Do it."""
    first, last, of = map(int, numbers)
    torch.set_num_threads(1)
    use(folder, device, 0)  # imports, kernels
    begun = time.monotonic()
    use(folder, device, 0)
    longest = time.monotonic() - begun + RUN_SECONDS
    for number in range(first, last):
        killer = threading.Thread(target=kill_at, args=[longest * (number + 0.5) / of])
        killer.start()
        try:
            use(folder, device, 600)
        except WorkerError as error:
            assert "rank 1 has died by signal 9" in str(error), error
        else:
            raise AssertionError("nobody saw that a rank has died")
        killer.join()
        assert not followers()
        assert not torch.distributed.is_initialized()
        sys.stdout.write(f"kill {number} is clean\n")
        sys.stdout.flush()


def kill_ranks(folder: Path, device: str, kills: int, at_a_time: int) -> None:
    """Run this program for so many kills; it must end by itself each time."""
    tiny_models.save_tiny_model(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for first in range(0, kills, at_a_time):
        last = min(first + at_a_time, kills)
        command = [sys.executable, __file__, folder, device, first, last, kills]
        done = subprocess.run(
            [*map(str, command)], env=environment, text=True, capture_output=True, check=False
        )
        output = f"{done.stdout}\n{done.stderr}"
        assert done.returncode != -signal.SIGABRT, output
        assert done.returncode == 0, output
        assert done.stdout.count("is clean") == last - first, output


if __name__ == "__main__":
    main(*sys.argv[1:])
