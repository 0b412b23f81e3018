"""A program that kills rank 1 of a model again and again, at moments spread over its life.

    python tests/killed_ranks.py FOLDER DEVICE FIRST LAST OF

FOLDER has a model, and DEVICE is cpu or cuda. Kills FIRST to LAST - 1 of OF are done, each with two
new ranks, and a line is printed for each one that ended with a clear error and left nothing behind.

    python tests/killed_ranks.py FOLDER DEVICE SECONDS

This kills rank 1 of the first ranks of a process, so many seconds after their first run.

    python tests/killed_ranks.py FOLDER DEVICE

This uses two ranks and ends without closing them.
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
from treegen.model.model import Model
from treegen.model.rank_processes import RankGroup, load_tensor_parallel

TREE = Node("Q: Ann has 3 apples.\nA:", children=[Node(f" {n}", samples=4) for n in range(3)])
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
unclosed: list[LLM] = []
RUN_SECONDS = 0.5  # in which kills hit runs; earlier ones hit the start, the join and the load


class Alone:
    """The leader of a group with a single rank."""

    failed = ""
    folder = Path()

    def call_followers(self, name: str, *arguments: object) -> None:
        """There are no other ranks."""

    def check(self) -> None:
        """Nobody can fail."""

    def fail(self, message: str) -> None:
        """Nobody ends."""


def followers() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def llm_of(model: Model) -> LLM:
    """Return an LLM that replays CUDA graphs on a GPU, which contain collectives."""
    return LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="8MiB", compile=False)


def use(folder: str, device: str, seconds: float, kill_after: float | None = None) -> None:
    """Start two ranks and use them for a while; a rank that is killed raises WorkerError.

    With `kill_after`, rank 1 is killed so many seconds after the first run.
    """
    with RankGroup(2, device) as group:
        model = group.load(partial(load_model, folder, dtype="float32"))
        llm = llm_of(model)
        end = time.monotonic() + seconds
        if kill_after is not None:
            llm.run(TREE, LONG)
            threading.Timer(kill_after, os.kill, [group.pids[0], signal.SIGKILL]).start()
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
    torch.set_num_threads(1)
    if not numbers:
        unclosed.append(llm_of(load_tensor_parallel(folder, 2, device=device, dtype="float32")))
        unclosed[0].run(TREE, LONG)
        sys.stdout.write("an end without a close is clean\n")
        return
    if len(numbers) == 1:
        kill_first_ranks(folder, device, float(numbers[0]))
        return
    first, last, of = map(int, numbers)
    use(folder, device, 0)  # imports, kernels
    begun = time.monotonic()
    use(folder, device, 0)
    longest = time.monotonic() - begun + RUN_SECONDS
    for number in range(first, last):
        killer = threading.Thread(target=kill_at, args=[longest * (number + 0.5) / of])
        killer.start()
        expect_death(folder, device)
        killer.join()
        sys.stdout.write(f"kill {number} is clean\n")
        sys.stdout.flush()


def kill_first_ranks(folder: str, device: str, seconds: float) -> None:
    """Kill a rank of the first ranks of this process; the next ones must work, on the same GPU."""
    expect_death(folder, device, seconds)
    use(folder, device, 0.1)
    sys.stdout.write(f"kill after {seconds:g} s is clean\n")


def expect_death(folder: str, device: str, kill_after: float | None = None) -> None:
    """Use two ranks until one is killed, and check that nothing is left of them."""
    try:
        use(folder, device, 600, kill_after)
    except WorkerError as error:
        assert "rank 1 has died by signal 9" in str(error), error
    else:
        raise AssertionError("nobody saw that a rank has died")
    assert not followers()
    assert not torch.distributed.is_initialized()


def kill_ranks(folder: Path, device: str, kills: int, at_a_time: int) -> None:
    """Run this program for so many kills; it must end by itself each time."""
    tiny_models.save_tiny_model(folder)
    for first in range(0, kills, at_a_time):
        last = min(first + at_a_time, kills)
        assert run_program(folder, device, first, last, kills).count("is clean") == last - first


def run_program(*arguments: object) -> str:
    """Run this program, which must end well, and return its output."""
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
