"""Whole jobs on one worker and on several: what dealing and collecting leave of N times."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from treegen.bench.shapes import build_model, shape_of
from treegen.cluster.cluster import Cluster
from treegen.cluster.places import Places
from treegen.model.memory import free_unused
from treegen.options import EngineOptions
from treegen.params import SamplingParams
from treegen.prompts.tree import Node

_SEED = 0


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """Problems below one prefix, in tokens; samples end at random, mean_tokens long or shorter."""

    problems: int = 64
    samples: int = 16
    prefix: int = 512
    problem_tokens: int = 64
    mean_tokens: int = 64

    @property
    def params(self) -> SamplingParams:
        """How samples are drawn, but for what ends them."""
        return SamplingParams(max_tokens=4 * self.mean_tokens, seed=_SEED, ignore_eos=True)

    def tree(self, vocab_size: int) -> Node:
        """The prompts, of made-up tokens."""
        first = [2 + i % (vocab_size - 2) for i in range(self.prefix)]
        below = [
            Node([2 + (7 * i + 31 * n) % (vocab_size - 2) for i in range(self.problem_tokens)],
                 samples=self.samples, id=str(n))
            for n in range(self.problems)
        ]  # fmt: skip
        return Node(first, children=below, samples=0)


@dataclass(frozen=True, slots=True)
class ClusterTime:
    """The whole job on some workers. startup_seconds: until all have the model."""

    workers: int
    startup_seconds: float
    seconds: float
    tokens: int
    prompt_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Samples' tokens over the whole time, prefill included."""
        return self.tokens / self.seconds


def compare(
    job: ClusterJob,
    places: Places,
    counts: tuple[int, ...],
    *,
    model: str | None,
    shape: str,
    options: EngineOptions,
) -> Iterator[ClusterTime]:
    """Time a job on each number of workers; the same samples each time.

    model: a checkpoint. Without one, weights of a shape are made up.
    """
    with tempfile.TemporaryDirectory(prefix="treegen-bench-") as folder:
        if model is None:
            _write(shape, Path(folder), options.dtype, places.device)
        options = replace(options, model=model or folder)
        for count in counts:
            yield _timed(job, replace(places, count=count, gpus=places.gpus[:count]), options)


def _timed(job: ClusterJob, places: Places, options: EngineOptions) -> ClusterTime:
    start = time.perf_counter()
    with Cluster.at(places, options) as cluster:
        size = cluster.spec.vocab_size
        # Random weights draw all tokens about alike, so a row ends with this chance at each.
        ends = range(2, 2 + max(size // job.mean_tokens, 1))
        params = replace(job.params, stop_token_ids=tuple(ends))
        tree = job.tree(size)
        startup = time.perf_counter() - start
        few = replace(job, problems=2 * cluster.num_workers)
        cluster.run(few.tree(size), params)  # compiles, where that is done
        start = time.perf_counter()
        result = cluster.run(tree, params)
        seconds = time.perf_counter() - start
        return ClusterTime(
            workers=cluster.num_workers,
            startup_seconds=startup,
            seconds=seconds,
            tokens=sum(each.num_tokens for each in result.completions),
            prompt_tokens=result.usage.prompt_tokens_computed,
        )


def _write(shape: str, folder: Path, dtype: str, device: str) -> None:
    """Write a checkpoint with random weights, which every worker reads."""
    model, tokenizer = build_model(shape_of(shape), dtype=dtype, device=device)
    disable_progress_bar()
    model.module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    where = model.device
    del model
    gc.collect()
    free_unused(where)
