"""Models that two GPUs compute together: the same samples as one GPU, and an end to every fault.

The tests share two processes, which load one model after another. A test that breaks them gets the
next one new ones. What waits for too long is ended, so no test waits for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_cases import FEW_SHOT, tree_of
from killed_ranks import kill_ranks, run_program
from summed_ranks import compare_sums
from torch import Tensor

from treegen import LLM, Node, RunResult, SamplingParams
from treegen.engine.compute.levels import make_level
from treegen.engine.compute.model_runner import PrefillInputs
from treegen.errors import InputError, WorkerError
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.rank_processes import RankGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PAIRS = [("Q: Ann has", " 3 apples"), ("Q: Ann has", " 14 pens")]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, seed=3)
TOP_P = SamplingParams(max_tokens=16, seed=3, top_p=0.9, top_k=50, logprobs=2)
KILLS = int(os.environ.get("TREEGEN_TEST_KILLS", "3"))
LONGEST = 75.0  # seconds in which a test is done with its two GPUs
LONGEST_OF_SEVERAL = 220.0  # which compiles the layers for each arrangement


def show(text: str) -> None:
    """Seen with pytest -s."""
    sys.stderr.write(f"\n{text}\n")


def llm_of(model: Model, *, eager: bool = True) -> LLM:
    return LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="32MiB", eager=eager)


def prefill_logits(llm: LLM) -> Tensor:
    """Logits [40, V] of a pass over one text."""
    num, size = 40, llm.cache.page_size
    index, none = np.arange(num), np.array([0])
    pages = np.arange(1, 1 - (-num // size), dtype=np.int32)[None]
    given = PrefillInputs(
        tokens=3 + 7 * index,
        positions=index,
        slots=size + index,
        logit_indices=index,
        levels=[make_level(none, none + num, pages, none + num, none, causal=True)],
        pieces=None,
    )
    with torch.inference_mode():
        logits, _ = llm.engine.make_model_runner().prefill(given)
    return logits.float().cpu()


def distance(got: Tensor, want: Tensor) -> float:
    """How far logits are apart at most; also shown."""
    far = (got - want).abs().max().item()
    show(f"logits differ by {far:.2g} at most, and are up to {want.abs().max():.2g}")
    return far


def different(got: RunResult, want: RunResult) -> int:
    """How many samples differ; also shown is the first that does."""
    pairs = list(zip(got.completions, want.completions, strict=True))
    found = [(a.tokens, b.tokens) for a, b in pairs if a.tokens != b.tokens]
    if found:
        show(f"{len(found)} of {len(pairs)} differ, the first: {found[0][0]}, not {found[0][1]}")
    return len(found)


class Pairs:
    """Models on one GPU and on two, of which the last ones are kept."""

    def __init__(self, folder: Path) -> None:
        """Nothing is started."""
        self.folder = folder
        self._ones: dict[str, LLM] = {}
        self._group: RankGroup | None = None
        self._two: tuple[str, bool, LLM] | None = None

    def one(self, family: str) -> LLM:
        """The model on one GPU."""
        if family not in self._ones:
            tiny_models.save_tiny_model(self.folder / family, family)
            self._ones[family] = llm_of(load_model(str(self.folder / family), dtype="float32"))
        return self._ones[family]

    @contextmanager
    def group(self, longest: float = LONGEST) -> Iterator[RankGroup]:
        """Two GPUs. An error ends them, and so does the time, in seconds."""
        if self._group is None:
            self._group = RankGroup(2)
        watch = threading.Timer(longest, self._kill, [longest, self._group.pids])
        watch.start()
        try:
            yield self._group
        except AssertionError:
            raise  # about numbers; the group goes on
        except BaseException:
            self.close()
            raise
        finally:
            watch.cancel()

    @contextmanager
    def two(self, family: str, *, eager: bool = True) -> Iterator[LLM]:
        """The model on two GPUs."""
        self.one(family)
        with self.group() as group:
            if self._two is None or self._two[:2] != (family, eager):
                path = str(self.folder / family)
                model = group.load(partial(load_model, path, dtype="float32"))
                self._two = family, eager, llm_of(model, eager=eager)
            yield self._two[2]

    @contextmanager
    def other(self, path: Path, dtype: str) -> Iterator[Model]:
        """Another model on two GPUs, for several LLMs, in place of the one that is kept."""
        self.forget_model()
        with self.group(LONGEST_OF_SEVERAL) as group:
            yield group.load(partial(load_model, str(path), dtype=dtype))

    def forget_model(self) -> None:
        """Load the next model again, because something else was loaded in between."""
        self._two = None

    def close(self) -> None:
        """End the two GPUs' processes."""
        group, self._group, self._two = self._group, None, None
        if group is not None:
            group.close()

    @staticmethod
    def _kill(seconds: float, pids: list[int]) -> None:
        show(f"ended after {seconds:g} s, for the test still waits for them: processes {pids}")
        for number in (signal.SIGUSR1, signal.SIGKILL):  # the first shows where they are
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, number)
            time.sleep(1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    found = Pairs(tmp_path_factory.mktemp("models"))
    yield found
    found.close()


def test_logits_of_a_prefill(pairs: Pairs) -> None:
    want = prefill_logits(pairs.one("llama"))
    with pairs.two("llama") as llm:
        assert distance(prefill_logits(llm), want) < 1e-3


def test_greedy_draws(pairs: Pairs) -> None:
    want = pairs.one("llama").run(tree_of(4), GREEDY)
    with pairs.two("llama") as llm:
        assert different(llm.run(tree_of(4), GREEDY), want) == 0


def test_sampled_draws(pairs: Pairs) -> None:
    want = pairs.one("llama").run(tree_of(20), SAMPLED)
    with pairs.two("llama") as llm:
        # float32 sums in another order may flip a draw that lies on a boundary, rarely.
        assert different(llm.run(tree_of(20), SAMPLED), want) <= 2


def test_top_p_draws(pairs: Pairs) -> None:
    want = pairs.one("llama").run(tree_of(20), TOP_P)
    with pairs.two("llama") as llm:
        assert different(llm.run(tree_of(20), TOP_P), want) <= 2


def test_scores(pairs: Pairs) -> None:
    want = pairs.one("llama").score(PAIRS)
    with pairs.two("llama") as llm:
        for actual, expected in zip(llm.score(PAIRS), want, strict=True):
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_compiled_layers_and_graphs(pairs: Pairs) -> None:
    one, each = pairs.one("llama"), (GREEDY, SAMPLED, TOP_P)
    want = [one.run(tree_of(4), params) for params in each]
    with pairs.two("llama", eager=False) as llm:
        got = [llm.run(tree_of(4), params) for params in each]
    assert got[0].usage.uncompiled_because == ""
    counts = [different(actual, expected) for actual, expected in zip(got, want, strict=True)]
    assert counts[0] == 0
    assert max(counts) <= 2


def test_sums_in_shared_memory_equal_those_by_nccl(pairs: Pairs) -> None:
    compare: Any = compare_sums
    with pairs.group() as group:
        compared: Any = group.load(compare)
        show(f"{compared}")
        assert compared["shared"], "torch's symmetric memory does not work on these GPUs"
        assert compared["unequal"] == []
        pairs.forget_model()


@pytest.mark.timeout(1200)
def test_ranks_that_are_killed_at_any_moment_leave_the_process_alive(tmp_path: Path) -> None:
    kill_ranks(tmp_path, "cuda", KILLS, at_a_time=10)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "qwen3",
        "mixtral",
        "phi3",
        "olmo2",
        "cohere2",
        "qwen3_moe",
        "deepseek_v3",
        "gemma3_on_text",
        "gpt_oss",
    ],
)
def test_families(family: str, pairs: Pairs) -> None:
    one = pairs.one(family)
    logits = prefill_logits(one)
    want = [one.run(tree_of(4), params) for params in (GREEDY, SAMPLED)]
    with pairs.two(family) as llm:
        assert distance(prefill_logits(llm), logits) < 1e-3
        got = [llm.run(tree_of(4), params) for params in (GREEDY, SAMPLED)]
    greedy, sampled = (
        different(actual, expected) for actual, expected in zip(got, want, strict=True)
    )
    assert greedy == 0
    assert sampled <= 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("llama", "float32"),
        ("qwen3_moe", "bfloat16"),
        ("mixtral", "float32"),
    ],
)
def test_reproducible_samples_depend_on_nothing_else(
    family: str, dtype: str, eager: bool, pairs: Pairs, tmp_path: Path
) -> None:
    """Two ranks add up the same in either order."""
    tiny_models.save_tiny_model(tmp_path, family, head_dim=16)
    leaves = [
        Node(f"Q: Ann has {7 * i % 31} apples{' or so' * (i % 3)}.\nA:", samples=8, id=str(i))
        for i in range(9)
    ]

    def run(model: Model, leaves: list[Node], **options: Any) -> dict[Any, Any]:
        llm = LLM(
            model,
            tokenizer=tiny_models.tiny_tokenizer(),
            reproducible=True,
            eager=eager,
            **{"memory": "64MiB", **options},
        )
        result = llm.run(Node(FEW_SHOT, children=leaves), SamplingParams(max_tokens=40, seed=5))
        assert result.usage.impl == "invariant"
        return {(c.prompt_id, c.sample_index): (c.tokens, c.logprob) for c in result.completions}

    with pairs.other(tmp_path, dtype) as model:
        whole = run(model, leaves)
        parts = {
            "reversed": run(model, leaves[::-1]),
            "two": run(model, leaves[2:4]),
            "few rows": run(model, leaves, max_rows=5),
            "few pages": run(model, leaves, memory="3MiB", page_size=16),
            "nothing shared": run(model, leaves, sharing="off"),
            "all shared": run(model, leaves, sharing="all", prefill_chunk=40),
        }
    different = {
        name: [(key, part[key], whole[key]) for key in part if part[key] != whole[key]]
        for name, part in parts.items()
    }
    assert not any(different.values()), different


def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    with pytest.raises(InputError, match="requires 999 GPUs, but only"):
        LLM(str(tmp_path), tensor_parallel_size=999)
    with pytest.raises(InputError, match=r"'cuda:1' selects one GPU, .* CUDA_VISIBLE"):
        LLM(str(tmp_path), device="cuda:1", tensor_parallel_size=2)


@pytest.mark.timeout(120)
def test_a_process_ends_whose_ranks_were_not_closed(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    assert "is clean" in run_program(tmp_path, "cuda")


@pytest.mark.timeout(300)
def test_gpus_work_after_the_first_group_has_died(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    for seconds in (0.001, 0.21):
        assert "is clean" in run_program(tmp_path, "cuda", seconds)


def test_a_killed_rank_ends_the_run_and_nothing_hangs(pairs: Pairs) -> None:
    with pairs.two("llama") as llm:
        stream = llm.stream(tree_of(20), SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(20):
            stream.step()
        with pairs.group() as group:
            os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 has died by signal 9"):
            list(stream)
        with pytest.raises(WorkerError, match="create a new LLM"):
            llm.run(tree_of(1))
    pairs.close()
