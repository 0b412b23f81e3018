"""The same prompts through transformers' own engines: `generate`, and continuous batching.

`generate` computes, stores and reads a prompt once for each sample. Continuous batching stores
shared prompts once, but reads them once for each sample. The figures of docs/performance.md come
from

    python examples/benchmarks/transformers_baseline.py --shape llama3.2-1b --rows 64 \\
        --prefix 1024 --new-tokens 32 --against generate
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import torch

from treegen.bench.decode import MAX_ROWS, Bench, WorkloadResult
from treegen.bench.timing import Spread, free_bytes, synchronize
from treegen.bench.workloads import SHARING_MODES, Case, Workload, decode_cases
from treegen.cli.bench.decode import run_cases
from treegen.cli.bench.options import (
    RUNS,
    int_list_option,
    int_option,
    name_list_option,
    shape_or_model,
)
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import json_line
from treegen.common.formatting import format_bytes, summarize_error
from treegen.errors import CapacityError, InputError
from treegen.model.attention_hook import ATTENTION
from treegen.model.memory import empty_device_cache
from treegen.prompts.tree import prompts_of

if TYPE_CHECKING:
    from treegen.model.model import Model

# torch's own kernels. Other kernels would have to be installed, or downloaded from the hub.
_ATTENTION: Final = "sdpa"
GENERATE: Final = "generate"
CONTINUOUS: Final = "continuous"
ENGINES: Final = (GENERATE, CONTINUOUS)
"""Modes: transformers' `generate`, and its continuous batching."""


@dataclass(frozen=True, slots=True)
class StockRun:
    """The times of one run.

    decode_seconds: the time without prefill and first tokens; None if the engine does not report it
    separately.
    """

    seconds: float
    decode_seconds: float | None


class TransformersBench(Bench):
    """Runs treegen's modes, and then transformers' engines."""

    def measure(self, cases: Sequence[Case]) -> Iterator[WorkloadResult]:
        """Yield results as they arrive."""
        yield from super().measure(cases)
        for engine in ENGINES:
            for case in cases:
                if engine in case.modes:
                    rows = min(case.workload.max_rows or MAX_ROWS, case.workload.rows)
                    first = case.workload.first(rows)
                    yield measure(engine, self.model, self.tokenizer, first, self.settings.repeats)


def check_engines(cases: Sequence[Case], ranks: int) -> None:
    """Raise InputError if transformers' engines should run on several GPUs."""
    if ranks > 1 and any(set(case.modes) & set(ENGINES) for case in cases):
        raise InputError(
            "--tp is not supported with the engines of transformers; remove --tp or these engines"
        )


def measure(
    engine: str, model: Model, tokenizer: Any, workload: Workload, repeats: int
) -> WorkloadResult:
    """Run a workload as one batch with one of transformers' engines; report why if it fails.

    The module must not be compiled. Afterwards it uses treegen's attention again.

    Args:
        engine: The engine, one of `ENGINES`.
        model: The model.
        tokenizer: Its tokenizer.
        workload: The workload.
        repeats: Timed runs.
    """
    runs: list[StockRun] = []
    problem = ""
    try:
        run = _runner(engine, model, tokenizer, workload)
        first = run()
        runs = [run() for _ in range(repeats)]
    except CapacityError as error:
        problem = str(error)
    except torch.cuda.OutOfMemoryError:
        problem = "the GPU ran out of memory"
    except Exception as error:  # transformers failed; the rest of the table is still useful
        problem = f"{type(error).__name__}: {summarize_error(error)}"
    # Outside the except blocks, in which the error keeps tensors alive.
    _restore(model)
    if problem:
        return WorkloadResult(workload, engine, workload.rows, skipped=problem)
    decode = [r.decode_seconds for r in runs if r.decode_seconds is not None]
    tokens = workload.rows * (workload.new_tokens - 1)
    return WorkloadResult(
        workload,
        engine,
        workload.rows,
        tokens_per_second=Spread.of([tokens / seconds for seconds in decode]) if decode else None,
        job=Spread.of([workload.rows * workload.new_tokens / r.seconds for r in runs]),
        seconds=Spread.of([r.seconds for r in runs]),
        startup_seconds=first.seconds,
        impl=_ATTENTION,
    )


def _runner(
    engine: str, model: Model, tokenizer: Any, workload: Workload
) -> Callable[[], StockRun]:
    """Return a function that runs a workload once.

    Raises:
        CapacityError: the workload is not likely to fit.
    """
    prompts = []
    for prompt in prompts_of(workload.tree(tokenizer, model.spec.vocab_size)):
        contents: list[Any] = [node.content for node in prompt.path]
        prompts += [[token for content in contents for token in content]] * prompt.samples
    model.module.set_attn_implementation(_ATTENTION)
    if engine == GENERATE:
        _check_fits(model, workload)
        return lambda: _generate(model, prompts, workload.new_tokens)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return lambda: _continuous(model, prompts, workload.new_tokens)


def _restore(model: Model) -> None:
    """Free the engine's memory, and make the module use treegen's attention again."""
    module: Any = model.module
    if hasattr(module, "destroy_cached_continuous_batching_manager"):
        module.destroy_cached_continuous_batching_manager()
    module.set_attn_implementation(ATTENTION)
    empty_device_cache(model.device)


def _check_fits(model: Model, workload: Workload) -> None:
    """Raise CapacityError if keys and values of all rows, or their prefill, are unlikely to fit.

    generate computes the prompts of all rows in one pass.
    """
    config: Any = model.module.config.get_text_config(decoder=True)
    widths = 4 * config.hidden_size + 2 * getattr(config, "intermediate_size", config.hidden_size)
    length = workload.prompt_tokens + workload.new_tokens
    need = workload.rows * (
        length * model.spec.kv_bytes_per_token
        + workload.prompt_tokens * widths * model.dtype.itemsize
    )
    free = free_bytes(model.device)
    if need > free:
        raise CapacityError(
            f"{workload.rows:,} rows of {length:,} tokens take about {format_bytes(need)}, but "
            f"only {format_bytes(free)} are free; use fewer rows"
        )


def _generate(model: Model, prompts: list[list[int]], new_tokens: int) -> StockRun:
    ids = torch.tensor(prompts, device=model.device)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        module: Any = model.module
        out = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        synchronize(model.device)
        assert out.shape == (ids.shape[0], ids.shape[1] + count)
        return time.perf_counter() - start

    first, total = seconds(1), seconds(new_tokens)
    return StockRun(total, total - first if new_tokens > 1 and total > first else None)


def _continuous(model: Model, prompts: list[list[int]], new_tokens: int) -> StockRun:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    options: dict[str, Any] = {"persistent_manager": True}
    if "auto_switch_to_flash" in inspect.signature(ContinuousBatchingConfig).parameters:
        options["continuous_batching_config"] = ContinuousBatchingConfig(auto_switch_to_flash=False)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=-1)
    module: Any = model.module
    start = time.perf_counter()
    # The manager persists between calls, so only the first call, which is not timed, captures
    # graphs.
    done = module.generate_batch(inputs=prompts, generation_config=config, **options)
    synchronize(model.device)
    tokens = sum(len(output.generated_tokens) for output in done.values())
    if tokens != len(prompts) * new_tokens:
        raise RuntimeError(f"expected {len(prompts) * new_tokens:,} tokens, got {tokens:,}")
    return StockRun(time.perf_counter() - start, None)


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: llama3.2-1b.")
@int_list_option("--rows", "Samples decoded at once. Default: 64.")
@int_list_option("--prefix", "Prompt tokens that all share. Default: 1024.")
@int_option("--new-tokens", 32, "Tokens of each sample.", minimum=2)
@name_list_option("--modes", SHARING_MODES, "Some of auto, all, one and off.", default="all")
@name_list_option(
    "--against", ENGINES, "Some of generate and continuous.", default="generate,continuous"
)
@add_options(*RUNS)
def main(
    shape: str | None,
    rows: list[int] | None,
    prefix: list[int] | None,
    new_tokens: int,
    modes: tuple[str, ...],
    against: tuple[str, ...],
    **options: Any,
) -> None:
    """Samples below a shared prefix, drawn by treegen and by transformers' own engines."""
    modes = (*modes, *against)
    cases = decode_cases(rows or [64], prefix or [1024], new_tokens, modes=modes)
    shape = shape_or_model(shape, options["model"], "llama3.2-1b")
    check_engines(cases, options["ranks"])
    _, document = run_cases(cases, shape, options, bench_type=TransformersBench)
    json_line({"bench": "decode", **document})


if __name__ == "__main__":
    main()
