"""Ranks of a model that die, fail or are closed: all end, and the error says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny_models
from engine_cases import tree_of
from failing_ranks import (
    draw_other_tokens,
    fail_in_rank_1,
    load_with_failing_update,
    load_with_full_memory,
    share_memory_of_rank_0,
)
from forked_ranks import forked_group
from processes import descendants, living

from treegen import LLM, SamplingParams
from treegen.errors import CapacityError, InputError, NumericsError, WorkerError
from treegen.model import rank_processes
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.rank_processes import FollowerProcesses, RankGroup
from treegen.model.training import rank_updates


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_ranks_that_share_a_key_head_and_one_that_is_killed(tmp_path: Path) -> None:
    """Two ranks for one key head. Rank 1 is killed in the middle of a run."""
    tiny_models.save_tiny_model(tmp_path, num_key_value_heads=1)
    params = SamplingParams(max_tokens=10, seed=3)
    want = LLM(str(tmp_path), device="cpu", memory="4MiB").run(tree_of(3), params)
    with forked_group(2) as group:
        model = group.load(partial(load_model, str(tmp_path)))
        llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB")
        assert [layer.kv_heads for layer in llm.spec.layers] == [1, 1]
        got = llm.run(tree_of(3), params)
        assert [c.tokens for c in got.completions] == [c.tokens for c in want.completions]
        stream = llm.stream(tree_of(4), SamplingParams(max_tokens=150, ignore_eos=True))
        for _ in range(10):
            stream.step()
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 has died by signal 9"):
            list(stream)
        with pytest.raises(WorkerError, match="create a new LLM"):
            llm.run(tree_of(1))


def test_a_rank_that_is_killed_while_it_starts() -> None:
    before = children()

    def kill() -> None:
        while not (started := children() - before):
            time.sleep(0.01)
        os.kill(int(started.pop()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkerError, match="cannot be started: rank 1 has died by signal 9; check"):
        RankGroup(2, "cpu")
    killer.join()
    assert children() == before


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (fail_in_rank_1, "rank 1: ValueError: no luck"),
        (draw_other_tokens, "ranks of a tensor-parallel model have drawn different tokens"),
    ],
)
def test_an_error_of_one_rank_is_told(what: Callable[..., Model], message: str) -> None:
    with forked_group(2) as group, pytest.raises(WorkerError, match=message):
        group.load(what)


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_end_if_one_fails_in_an_update(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it, and the next update would meet them in this one."""
    monkeypatch.setattr(rank_updates, "write_shard", rank_updates.write_shard)  # is put back
    path = str(tiny_models.save_tiny_model(tmp_path))
    with forked_group(2) as group:
        model = group.load(partial(load_with_failing_update, path, failing))
        llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB")
        for _ in range(2):
            with pytest.raises(WorkerError, match=f"rank {failing}.*OutOfMemoryError: GPU is full"):
                llm.update(path)
        with pytest.raises(WorkerError, match="create a new LLM"):
            llm.run(tree_of(1))


def test_no_rank_waits_for_the_memory_of_a_rank_that_has_none() -> None:
    with forked_group(2) as group:
        shares_none: Any = group.load(share_memory_of_rank_0)
    assert shares_none == 1


def test_no_rank_that_lives_is_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of rank 0 is raised after a few seconds, however many ranks still load."""
    clock = [0.0]

    class Loading:
        returncode: int | None = None

        def wait(self, timeout: float) -> None:
            clock[0] += timeout
            raise subprocess.TimeoutExpired("rank", timeout)

    class Killed(Loading):
        returncode = -9

        def wait(self, timeout: float) -> None:
            pass

    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    followers = FollowerProcesses.__new__(FollowerProcesses)
    followers._processes = cast(Any, [Loading() for _ in range(7)])
    assert followers.describe_death() == "" and clock[0] <= 3
    followers._processes = cast(Any, [Loading(), Loading(), Killed()])
    assert followers.describe_death() == "rank 3 has died by signal 9"


def test_processes_end_with_the_model(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    before = children()
    llm = LLM(str(tmp_path), device="cpu", memory="4MiB", tensor_parallel_size=2)
    assert len(children() - before) == 1
    llm.close()
    assert not children() - before
    with pytest.raises(WorkerError, match="the LLM was closed"):
        llm.run(tree_of(1))


def test_ranks_that_start_do_not_hold_up_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for rank 0, not for what it tells them."""
    waits: list[type[BaseException] | None] = []
    wait = subprocess.Popen.wait

    def waiting(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(subprocess.TimeoutExpired)
        code = wait(process, timeout)
        waits[-1] = None
        return code

    def interrupted(followers: FollowerProcesses, rank: int, connection: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    monkeypatch.setattr(FollowerProcesses, "_wait_for_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RankGroup(2, "cpu")
    assert waits == [None]


HOLD = """
import os, sys, time
from treegen.model.rank_processes import FollowerProcesses
FollowerProcesses._wait_for_start = lambda *_: (print("begun", flush=True), time.sleep(600))
FollowerProcesses(2, "cpu")
"""


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_leader_that_is_killed_leaves_no_rank_and_its_folder_is_swept(tmp_path: Path) -> None:
    """Ranks end while they still import; others' folders and those in use stay."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def begun() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD], env=environment, text=True, stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    def folders() -> set[Path]:
        return {each for each in tmp_path.glob("treegen-ranks-*") if not each.is_symlink()}

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "treegen-ranks-link").symlink_to(tmp_path / "mine")
    first = begun()
    ranks = descendants(first.pid)
    (left,) = folders()
    first.kill()
    first.communicate()
    second = begun()
    assert left not in folders() and len(folders()) == 1
    third = begun()
    assert len(folders()) == 2  # that of the second is in use
    for each in (second, third):
        ranks |= descendants(each.pid)
        each.kill()
        each.communicate()
    assert len(ranks) == 3
    while ranks.keys() & living().keys():  # the test's own limit of time counts
        time.sleep(0.1)
    assert (tmp_path / "mine" / "file").exists()


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_ranks_can_be_used_after_a_failure_between_logits_and_masked_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits for the draws of rank 0, which never makes them."""
    tiny_models.save_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=8, seed=3, structured_outputs={"regex": "[0-9]+"})
    expected = LLM(str(tmp_path), device="cpu", memory="4MiB").run(tree_of(3), params)

    def fail(*_: object) -> None:
        raise NumericsError("logits are not numbers")

    with forked_group(2) as group:
        model = group.load(partial(load_model, str(tmp_path)))
        llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", run_ahead=True)
        stream = llm.stream(tree_of(3), params)
        for _ in range(4):
            stream.step()
        monkeypatch.setattr(stream.scheduler, "_process_last", fail)
        with pytest.raises(NumericsError, match="not numbers"):
            stream.step()
        again = llm.run(tree_of(3), params)
    assert [c.tokens for c in again.completions] == [c.tokens for c in expected.completions]


def test_ranks_can_be_used_after_options_that_the_model_does_not_support(tmp_path: Path) -> None:
    """The other ranks hear of no options that rank 0 refuses."""
    path = str(tiny_models.save_tiny_model(tmp_path))
    with forked_group(2) as group:
        model = group.load(partial(load_model, path, dtype="bfloat16"))
        make = partial(LLM, model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB")
        with pytest.raises(InputError, match="reproducible"):
            make(reproducible=True)
        assert len(make().run(tree_of(2), SamplingParams(max_tokens=3)).completions) == 6


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_weights_can_be_updated_before_a_kept_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that had ended are returned first. Meanwhile no rank may wait for masked draws."""
    tiny_models.save_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=8, seed=3, structured_outputs={"regex": "[0-9]+"})

    def fail(*_: object) -> None:
        raise NumericsError("logits are not numbers")

    with forked_group(2) as group:
        model = group.load(partial(load_model, str(tmp_path)))
        llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", run_ahead=True)
        stream = llm.stream(tree_of(3), params)
        for _ in range(4):
            stream.step()
        ended: list[Any] = [None]
        monkeypatch.setattr(stream.scheduler, "_process_last", fail)
        monkeypatch.setattr(stream.scheduler._outputs, "take_finished", lambda: ended)
        assert stream.step() == ended
        assert llm.update(str(tmp_path)) == 1
        ended.clear()
        with pytest.raises(NumericsError, match="not numbers"):
            stream.step()
        assert len(llm.run(tree_of(3), params).completions) == 9


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", ["cache_size", "new_cache"])
def test_ranks_can_be_used_after_a_cache_that_does_not_fit_one_of_them(
    tmp_path: Path, step: str, failing: int
) -> None:
    path = str(tiny_models.save_tiny_model(tmp_path))
    with forked_group(2) as group:
        model = group.load(partial(load_with_full_memory, path, step, failing))
        make = partial(LLM, model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB")
        with pytest.raises(CapacityError, match="memory"):
            make()
        assert len(make().run(tree_of(2), SamplingParams(max_tokens=3)).completions) == 6
