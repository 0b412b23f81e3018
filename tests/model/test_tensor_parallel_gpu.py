"""Models that two GPUs compute together: the same samples as one GPU, and an end to every fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch

from treegen import LLM, Node, SamplingParams
from treegen.errors import InputError, WorkerError
from treegen.model.leading import Group
from treegen.model.load import load_model
from treegen.outputs import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

QUESTIONS = ["Q: Bob has 14 pens and 2 caps. How many?\nA:", "Q: Cy?\nA:", "Q: How many?\nA:"]
FEW_SHOT = "Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 2
FAMILIES = ["llama", "gemma2", "mixtral", "qwen3", "phi3", "olmo2", "cohere2", "qwen3_moe"]
FAMILIES += ["deepseek_v3", "gemma3_on_text"]


def tree_of(samples: int) -> Node:
    leaves = [Node(text, samples=samples, id=str(i)) for i, text in enumerate(QUESTIONS)]
    return Node(FEW_SHOT, children=leaves)


def alone(path: Path) -> LLM:
    model = load_model(str(path), dtype="float32")
    return LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="32MiB", eager=True)


def different(these: tuple[Completion, ...], those: tuple[Completion, ...]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(these, those, strict=True))


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Two GPUs, which load one model after another."""
    with Group(2) as group:
        yield group


def load(group: Group, path: Path, *, eager: bool) -> LLM:
    model = group.load(partial(load_model, str(path), dtype="float32"))
    tokenizer = tiny_models.tiny_tokenizer()
    return LLM(model, tokenizer=tokenizer, memory="32MiB", eager=eager)


def test_small_sums_are_done_in_shared_memory(group: Group) -> None:
    assert group.shares_memory


def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    with pytest.raises(InputError, match="needs 999 GPUs, and there are"):
        LLM(str(tmp_path), tensor_parallel_size=999)
    with pytest.raises(InputError, match=r"'cuda:1' is one GPU, .* CUDA_VISIBLE"):
        LLM(str(tmp_path), device="cuda:1", tensor_parallel_size=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_draw_what_one_draws(family: str, group: Group, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = SamplingParams(max_tokens=20, seed=3)
    filtered = SamplingParams(max_tokens=20, seed=3, top_p=0.9, top_k=50, logprobs=2)
    pairs = [("Q: Ann has", " 3 apples"), ("Q: Ann has", " 14 pens")]
    one = alone(tmp_path)
    want = [one.run(tree_of(20), params).completions for params in (greedy, plain, filtered)]
    scores = one.score(pairs)
    # Compiling takes half a minute.
    for eager in (True, False) if family in ("llama", "mixtral") else (True,):
        two = load(group, tmp_path, eager=eager)
        got = [two.run(tree_of(20), params) for params in (greedy, plain, filtered)]
        assert got[0].usage.uncompiled_because == ""
        assert different(got[0].completions, want[0]) == 0
        # float32 sums in another order may flip a draw that lies on a boundary, rarely.
        assert different(got[1].completions, want[1]) <= 2
        assert different(got[2].completions, want[2]) <= 2
        for mine, its in zip(two.score(pairs), scores, strict=True):
            assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4)


def test_a_killed_rank_ends_the_run_and_nothing_hangs(group: Group, tmp_path: Path) -> None:
    """The last test of the file, for the group is gone after it."""
    tiny_models.save_tiny_model(tmp_path, "llama")
    llm = load(group, tmp_path, eager=True)
    llm.run(tree_of(20), SamplingParams(max_tokens=8))
    stream = llm.stream(tree_of(20), SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(20):
        stream.step()
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 has died by signal 9"):
        list(stream)
    with pytest.raises(WorkerError, match="make a new LLM"):
        llm.run(tree_of(1))
