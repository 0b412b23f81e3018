"""Ranks of a model that die, fail or are closed: all end, and the error says why."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny_models
from failing_ranks import draw_other_tokens, fail_in_rank_1

from treegen import LLM, Node, SamplingParams
from treegen.errors import WorkerError
from treegen.model.leading import Followers, Group
from treegen.model.load import load_model
from treegen.model.model import Model

QUESTIONS = ["Q: Bob has 14 pens and 2 caps. How many?\nA:", "Q: Cy?\nA:", "Q: How many?\nA:"]


def tree_of(samples: int) -> Node:
    leaves = [Node(text, samples=samples, id=str(i)) for i, text in enumerate(QUESTIONS)]
    return Node("Q: Ann has 3 apples.\nA: The answer is 3.\n\n", children=leaves)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_ranks_that_share_a_key_head_and_one_that_is_killed(tmp_path: Path) -> None:
    """Two ranks for one key head. Rank 1 is killed in the middle of a run."""
    tiny_models.save_tiny_model(tmp_path, num_key_value_heads=1)
    params = SamplingParams(max_tokens=10, seed=3)
    want = LLM(str(tmp_path), device="cpu", memory="4MiB").run(tree_of(3), params)
    with Group(2, "cpu") as group:
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
        with pytest.raises(WorkerError, match="make a new LLM"):
            llm.run(tree_of(1))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (fail_in_rank_1, "rank 1: ValueError: no luck"),
        (draw_other_tokens, "ranks of a tensor-parallel model have drawn different tokens"),
    ],
)
def test_an_error_of_one_rank_is_told(what: Callable[..., Model], told: str) -> None:
    with Group(2, "cpu") as group, pytest.raises(WorkerError, match=told):
        group.load(what)


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

    def interrupted(followers: Followers, rank: int, connection: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    monkeypatch.setattr(Followers, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Group(2, "cpu")
    assert waits == [None]
