"""The engine's overhead on top of the model, and its gain over stock generation on a CPU.

`overhead` replaces the model by one whose forward pass is free. The rest of a step is
scheduling, building the batch, preparing attention, sampling and bookkeeping. `throughput` runs a
small random-weight model on the same prompts through treegen and through transformers' generate.
`memory` runs a thousand problems, few rows at once, and counts the pages and row slots in use.
The figures of docs/benchmarks/measure.md come from

    python examples/benchmarks/engine_overhead.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from tiny_model import ABOUT, FEW_SHOT, checkpoint, questions

from treegen.bench.shapes import byte_tokenizer
from treegen.bench.timing import describe_machine, headline
from treegen.cli.bench.options import CHECKPOINT, int_option
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.common.params import SamplingParams
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import ParamSet
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.llm import LLM
from treegen.model.batch import Batch
from treegen.model.tokenizer import load_tokenizer
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.plan import Request
from treegen.prompts.stops import StopConditions
from treegen.prompts.tree import Node
from treegen.report.tables import PrintableTable

_STEPS: Final = 200  # timed decode steps
_END: Final = 1  # the token that ends a sample


@dataclass(frozen=True, slots=True)
class Overhead:
    """Host time of a decode step in which no row ends, in milliseconds."""

    rows: int
    vocab_size: int
    median_ms: float
    p90_ms: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """The result of one way to draw the same samples.

    prompt_tokens: prompt tokens that the model computed.
    """

    name: str
    seconds: float
    tokens_per_second: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages in use over a long run.

    samples: samples that finished.
    peak_pages_first_tenth: maximum pages in use until a tenth of the samples had finished.
    peak_pages: maximum pages in use in the whole run.
    pages_after: pages in use at the end.
    peak_slots: row slots that were allocated.
    """

    problems: int
    samples: int
    peak_pages_first_tenth: int
    peak_pages: int
    pages_after: int
    peak_slots: int


class _FreeModel:
    """A model that computes nothing: it returns the same random logits, and never ends a sample."""

    device = torch.device("cpu")

    def __init__(self, rows: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(rows, vocab_size, generator=generator)
        self._logits[:, _END] = -torch.inf

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._logits[: len(batch.logits_at_S)]


def _free_scheduler(
    tokenizer: Any,
    rows: int,
    vocab_size: int,
    params: SamplingParams,
    problems: int,
    pages: int,
    max_rows: int | None = None,
) -> Scheduler:
    rng = np.random.default_rng(0)
    few_shot = rng.integers(2, vocab_size, 1000)
    samples = -(-rows // problems)
    requests = [
        Request(
            id=str(i),
            tokens=np.concatenate([few_shot, rng.integers(2, vocab_size, 60)]).astype(np.int32),
            samples=samples,
            rows=samples,
            max_tokens=params.max_tokens,
        )
        for i in range(problems)
    ]
    cache = PagedCache([], pages, page_size=16)
    model = _FreeModel(max(rows, 64), vocab_size)
    return Scheduler(
        compile_plan(requests, token_bytes=4096, num_layers=2),
        EngineResources(
            model=model,
            cache=cache,
            prefix_cache=PrefixCache(cache, 1),
            model_runner=ModelRunner(model, cache, None, "cpu"),
            max_rows=max_rows or rows,
            prefill_chunk=8192,
        ),
        [ParamSet(params, StopConditions(params, tokenizer, [_END], vocab_size))],
        [range(samples)] * problems,
    )


def overhead() -> Iterator[Overhead]:
    """Time decode steps with a free model at several numbers of rows and vocabulary sizes."""
    tokenizer = byte_tokenizer()
    params = SamplingParams(temperature=0.7, max_tokens=_STEPS + 40)
    for vocab_size in (32, 256):
        for num_rows in (64, 512, 4096):
            problems = max(num_rows // 40, 1)
            pages = 70 + problems * 5 + num_rows * (2 + params.max_tokens // 16)
            scheduler = _free_scheduler(tokenizer, num_rows, vocab_size, params, problems, pages)
            while len(scheduler.queue.live_slots) < num_rows:
                scheduler.step()
            times = []
            for _ in range(_STEPS):
                start = time.perf_counter()
                finished = scheduler.step()
                times.append(time.perf_counter() - start)
                assert not finished, "a row ended while steps without an end were timed"
            median, p90 = np.quantile(times, [0.5, 0.9]) * 1e3
            yield Overhead(num_rows, vocab_size, float(median), float(p90))


def memory() -> Memory:
    """Run many problems through a pool and report how many pages were in use."""
    params, problems, samples = SamplingParams(max_tokens=24), 1000, 4
    scheduler = _free_scheduler(
        byte_tokenizer(), problems * samples, 64, params, problems, 100_000, max_rows=64
    )
    finished = early = 0
    while scheduler.has_work:
        finished += len(scheduler.step())
        if finished <= problems * samples // 10:
            early = scheduler.usage.peak_pages
    used = scheduler.run.cache.pool.num_used
    slots = len(scheduler.run.rows.request)
    return Memory(problems, finished, early, scheduler.usage.peak_pages, used, slots)


def throughput(
    model: str | None = None, *, problems: int = 4, samples: int = 40, max_tokens: int = 64
) -> Iterator[Throughput]:
    """Draw the same number of samples with several engines; every sample has `max_tokens` tokens.

    Args:
        model: A checkpoint; None for a tiny one with random weights.
        problems: Number of problems. Default: 4.
        samples: Samples per problem. Default: 40.
        max_tokens: Tokens per sample. Default: 64.
    """
    with checkpoint(model) as path:
        texts = questions(problems)
        tree = Node(FEW_SHOT, children=[Node(question, samples=samples) for question in texts])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        rows = problems * samples
        for sharing, name in (("auto", "treegen"), ("off", "treegen, sharing off")):
            llm = LLM(
                path,
                device="cpu",
                max_rows=rows,
                check=False,
                sharing=sharing,  # type: ignore[arg-type]
            )
            llm.run(tree, SamplingParams(max_tokens=2))  # warm up
            start = time.perf_counter()
            result = llm.run(tree, params)
            yield _row(name, rows * max_tokens, start, result.usage.prompt_tokens_computed)
        prompts = [FEW_SHOT + question for question in texts]
        yield from _transformers(path, prompts, samples, max_tokens)


def _transformers(
    path: str, prompts: list[str], samples: int, max_tokens: int
) -> Iterator[Throughput]:
    """Run stock generate in one batch: with repeated prompts, or with num_return_sequences."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for name, copies, returned in (
        ("transformers generate, n copies", samples, 1),
        ("transformers generate, num_return_sequences", 1, samples),
    ):
        batch = tokenizer(
            [p for p in prompts for _ in range(copies)], return_tensors="pt", padding=True
        )
        start = time.perf_counter()
        out = model.generate(
            **batch,
            do_sample=True,
            top_k=0,
            num_return_sequences=returned,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert out.shape[0] == len(prompts) * samples
        yield _row(name, out.shape[0] * max_tokens, start, batch["input_ids"].numel())


def _row(name: str, tokens: int, start: float, prompt_tokens: int) -> Throughput:
    seconds = time.perf_counter() - start
    return Throughput(name, seconds, tokens / seconds, prompt_tokens)


@script
@CHECKPOINT
@int_option("--samples", 40, "Samples per problem.")
@int_option("--problems", 4, "Problems.")
@int_option("--max-tokens", 64, "Tokens per sample.")
@JSON
def main(model: str | None, samples: int, problems: int, max_tokens: int) -> None:
    """Host time per decode step, pages in use, and tokens per second against transformers."""
    machine = describe_machine(torch.device("cpu"))
    echo(f"{headline(machine)}\n")
    steps = list(overhead())
    echo("Host time of a decode step in which no row ends; the model's pass is free.")
    columns = {
        "Rows": "{0.rows:,}",
        "Vocabulary": "{0.vocab_size}",
        "median ms": "{0.median_ms:.3f}",
        "90% ms": "{0.p90_ms:.3f}",
    }
    print_table(PrintableTable.of(steps, columns))
    usage = memory()
    echo(
        f"\n{usage.problems:,} problems x {usage.samples // usage.problems} samples, 64 rows at "
        f"once: at most {usage.peak_pages} pages in use ({usage.peak_pages_first_tenth} within "
        f"the first tenth), {usage.pages_after} afterwards"
    )
    rows = list(throughput(model, problems=problems, samples=samples, max_tokens=max_tokens))
    echo(f"\n{problems} problems x {samples} samples x {max_tokens} tokens, {model or ABOUT}")
    columns = {
        "Engine": "{0.name}",
        "tokens/s": "{0.tokens_per_second:,.0f}",
        "seconds": "{0.seconds:.2f}",
        "prompt tokens": "{0.prompt_tokens:,}",
    }
    print_table(PrintableTable.of(rows, columns, words=["Engine"]))
    json_line({"machine": machine, "overhead": steps, "memory": usage, "throughput": rows})


if __name__ == "__main__":
    main()
