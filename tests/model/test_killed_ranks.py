"""Ranks that are killed at any moment end the process's use of them, and never the process."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import forked_group, forked_ranks
from killed_ranks import Alone, kill_ranks

from treegen.errors import ModelError, WorkerError
from treegen.model import rank_processes
from treegen.model.model import Model
from treegen.model.parallel import ranks as parallel_ranks
from treegen.model.parallel import shared_memory
from treegen.model.parallel.ranks import RankLeader, Ranks, abort, join, leave
from treegen.model.rank_processes import RankGroup

SIGNAL = "import os, treegen.llm.follower as f; f.join = lambda *_: os.kill(os.getpid(), {})"


def leave_and_note(leader: RankLeader, still: list[bool]) -> None:
    leave(leader)
    still.append(dist.is_initialized())


def test_threads_that_leave_at_once_abort_the_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborts = []
    abort = dist.distributed_c10d._abort_process_group

    def slowly() -> None:
        aborts.append(threading.current_thread())
        time.sleep(0.1)  # in which the other threads come
        abort()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", slowly)
    first, second = Alone(), Alone()
    for number, leader in enumerate((first, second), start=1):
        folder = tempfile.mkdtemp(dir=tmp_path)
        join(0, 1, torch.device("cpu"), Path(folder), leader)
        leave(Alone())  # of a group that has ended
        assert dist.is_initialized()
        still: list[bool] = []
        threads = [threading.Thread(target=leave_and_note, args=[leader, still]) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(aborts) == number
        assert still == [False] * 4  # each came back after the abort, not during it


@pytest.mark.parametrize("dies", [False, True])
def test_an_abort_ends_once_no_cuda_graph_has_collectives(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for these graphs, and a pass may still replay one when another rank dies."""
    reset = threading.Event()
    abort_group = dist.distributed_c10d._abort_process_group

    class Graph:
        def reset(self) -> None:
            reset.set()

    def wait_for_graphs() -> None:
        assert reset.wait(60)
        abort_group()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", wait_for_graphs)
    leader, graph = Alone(), Graph()
    ranks: Any = join(0, 1, torch.device("cpu"), tmp_path, leader)
    ranks.graphs.add(graph)
    if dies:
        abort(leader)
        abort(leader)
        assert not reset.is_set() and dist.is_initialized()
    leave(leader)
    assert reset.is_set() and not dist.is_initialized()


def test_a_group_is_left_although_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python starts no thread during exit, in which a rank may have to be killed."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    leader, shared = Alone(), Mock()
    join(0, 1, torch.device("cpu"), tmp_path, leader).shared = shared
    monkeypatch.setattr(parallel_ranks, "run_in_daemon", fail)
    with pytest.raises(RuntimeError, match="shutdown"):
        abort(leader)
    shared.release.assert_called_once_with()  # otherwise, sums of this rank wait for ever
    leave(leader)
    assert not dist.is_initialized()


def test_a_group_is_left_that_fails_while_it_shares_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    leader = Alone()
    monkeypatch.setattr(parallel_ranks, "share_memory", fail)
    with pytest.raises(RuntimeError, match="closed by peer"):
        join(0, 1, torch.device("cpu"), tmp_path, leader)
    leave(leader)
    assert not dist.is_initialized()


def test_memory_that_could_not_be_shared_is_not_shared_by_a_later_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new followers would number the exchange otherwise, and rank 0 would wait for them."""
    attempts = []

    def fail(*where: object) -> None:
        attempts.append(where)
        raise RuntimeError("pidfd_getfd: operation not permitted")

    monkeypatch.setattr(shared_memory, "import_kernels", lambda name: shared_memory)
    monkeypatch.setattr(shared_memory.SharedBuffer, "allocate", lambda device: torch.empty(0))
    monkeypatch.setattr(shared_memory.SharedBuffer, "__init__", fail)
    monkeypatch.setattr(shared_memory, "_shared", [])
    monkeypatch.setattr(shared_memory, "_has_atomics", lambda device, peer: True)
    for _ in range(2):
        assert shared_memory.share_memory(0, 2, torch.device("cuda", 0), bool) is None
    assert len(attempts) == 1


@pytest.mark.parametrize(
    ("number", "timeout", "message"),
    [
        (signal.SIGKILL, parallel_ranks.TIMEOUT, "rank 1 has died by signal 9"),
        (signal.SIGSTOP, 0.5, "rank 0 cannot join the other ranks: .*timeout"),
    ],
)
def test_a_rank_that_is_killed_or_stopped_while_it_joins(
    number: int, timeout: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would wait for it until gloo's or NCCL's own time limit; the next ranks can join."""
    send = SIGNAL.format(int(number))
    code = rank_processes._START_CODE.replace("main()", f"{send}; main()")
    with monkeypatch.context() as patched:
        patched.setattr(rank_processes, "_START_CODE", code)
        patched.setattr(parallel_ranks, "TIMEOUT", timeout)
        with forked_ranks(), pytest.raises(WorkerError, match=message):
            RankGroup(2, "cpu")
    assert not dist.is_initialized()
    with forked_group(2) as group:
        assert group.pids and dist.is_initialized()
    assert not dist.is_initialized()


def fail_once_rank_1_is_killed(device: torch.device, ranks: Ranks) -> Model:
    """Fail on rank 0 as the check of a model does where a collective has failed."""
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise ModelError("a forward pass fails: connection closed by peer")


def test_an_error_that_the_death_of_a_rank_has_caused_names_the_rank() -> None:
    message = "not all ranks could load the model: rank 1 has died by signal 9"
    with forked_group(2) as group, pytest.raises(WorkerError, match=message):
        group.load(fail_once_rank_1_is_killed)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_200_killed_ranks_on_a_cpu(tmp_path: Path) -> None:
    kill_ranks(tmp_path, "cpu", 200, 20)
