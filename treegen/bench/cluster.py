"""Whole jobs on one worker and on several: the speedup after distribution and collection costs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from treegen.bench.shapes import build_model, byte_tokenizer, shape_of
from treegen.bench.workloads import Workload
from treegen.common.lifetimes import Closeable
from treegen.common.params import SamplingParams
from treegen.llm import LLM
from treegen.llm.cluster.cluster import Cluster
from treegen.llm.cluster.placement import Placement
from treegen.llm.cluster.worker import from_checkpoint
from treegen.model.options import LOADING, EngineOptions

_SEED = 0


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """Problems after one prefix; lengths in tokens. Samples end at random."""

    problems: int = 64
    samples: int = 16
    prefix: int = 512
    problem_tokens: int = 64
    mean_tokens: int = 64
    """Mean length of a sample, before the limit."""
    max_tokens: int | None = None
    """Limit of a sample's length; None for four times the mean."""

    @property
    def workload(self) -> Workload:
        """The prompts and samples, with the usual limit of a sample's length."""
        return Workload(
            "cluster",
            prefix=self.prefix,
            new_tokens=self.mean_tokens,
            samples=self.samples,
            problems=self.problems,
            problem_tokens=self.problem_tokens,
            random_ends=True,
        )

    def params(self, vocab_size: int) -> SamplingParams:
        """Return sampling parameters under which some tokens, but no stop strings, end a sample."""
        params = self.workload.params(vocab_size)
        max_tokens = self.max_tokens or params.max_tokens
        return replace(params, seed=_SEED, max_tokens=max_tokens, stop=())


@dataclass(frozen=True, slots=True)
class ClusterTime:
    """The time of the whole job on some workers."""

    workers: int
    seconds: float
    tokens: int
    prompt_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of samples over the whole time, including prefill."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class RandomModelFactory:
    """Makes the same model with random weights in each worker."""

    shape: str

    def __call__(self, options: dict[str, Any]) -> LLM:
        """Return the model, on the device in `options`."""
        loading = {name: options[name] for name in ("dtype", "device", "quantization")}
        model, tokenizer = build_model(shape_of(self.shape), **loading)
        engine = {key: options[key] for key in options if key not in LOADING and key != "model"}
        return LLM(model, tokenizer=tokenizer, **engine)


class ClusterBench(Closeable):
    """Workers that are started and warmed up once, for jobs on some or all of them.

    Attributes:
        startup_seconds: Time until all workers have loaded the model.
        warm_up_seconds: Time of the first run of the whole job on all workers, including
            compilation.
    """

    def __init__(
        self, job: ClusterJob, placement: Placement, options: EngineOptions, *, shape: str | None
    ) -> None:
        """Start the workers, and run the job once.

        Raises the exceptions of `Cluster`.

        Args:
            job: The job to measure.
            placement: Where the workers run.
            options: How each worker makes its engine.
            shape: Shape of a model with random weights; None for the checkpoint in `options`.
        """
        start = time.perf_counter()
        self._job = job
        self._cluster = Cluster.at(
            placement,
            options,
            tokenizer=None if shape is None else byte_tokenizer(),
            make=from_checkpoint if shape is None else RandomModelFactory(shape),
        )
        try:
            loaded = time.perf_counter()
            self.startup_seconds = loaded - start
            self._run(job)
            self.warm_up_seconds = time.perf_counter() - loaded
        except BaseException:
            self.close()
            raise

    def time_job(self, workers: int) -> ClusterTime:
        """Run the job on the given number of workers; the samples are the same each time."""
        self._cluster.limit(workers)
        start = time.perf_counter()
        tokens, prompt_tokens = self._run(self._job)
        return ClusterTime(workers, time.perf_counter() - start, tokens, prompt_tokens)

    def _run(self, job: ClusterJob) -> tuple[int, int]:
        size = self._cluster.spec.vocab_size
        result = self._cluster.run(job.workload.tree(byte_tokenizer(), size), job.params(size))
        return sum(c.num_tokens for c in result.completions), result.usage.prompt_tokens_computed

    def close(self) -> None:
        """Stop the workers."""
        self._cluster.close()
