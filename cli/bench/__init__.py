"""`treegen bench` and `treegen selfcheck`: measure and check this machine."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.bench.decode import decode, prefill
from treegen.cli.bench.options import CHECKPOINT, DEVICE, int_list_option, int_option
from treegen.cli.options.choices import collect_choices, make_placement
from treegen.cli.options.options import (
    JSON,
    QUIET,
    Decorator,
    add_option_groups,
    add_options,
    option,
)
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.bench.cluster import ClusterJob, ClusterTime
    from treegen.llm.cluster.placement import Placement
    from treegen.model.options import EngineOptions


@click.command()
@add_option_groups("cluster")
@CHECKPOINT
@option("--shape NAME", "Shape of a model with random weights.", default="tiny")
@option("--dtype TYPE", "auto, float32, bfloat16 or float16.", default="auto")
@option("--memory SIZE", "Size of each worker's KV cache.")
@int_option("--problems", 64, "Problems below one prefix.")
@int_option("--samples", 16, "Samples per problem.")
@int_option("--prefix", 512, "Prompt tokens that all problems share.")
@int_option("--problem-tokens", 64, "Tokens of each problem.")
@int_option("--mean-tokens", 64, "Mean tokens per sample, with random weights.")
@int_option("--max-tokens", None, "Maximum tokens per sample. Default: four times the mean.")
@option("--eager", "On GPUs, skip compiling and CUDA graphs.")
@JSON
def cluster(
    model: str | None,
    shape: str,
    dtype: str,
    memory: str | None,
    eager: bool,
    gpus: str | None,
    workers: int | None,
    ray: str | None,
    **params: Any,
) -> None:
    """Time the same job on one worker and on all workers.

    Workers on CPUs share the cores, so only GPUs show how the speed scales.

    \f
    Args:
        model: Checkpoint directory.
        shape: Shape of a model with random weights.
        dtype: Type of the weights and activations.
        memory: Size of each worker's KV cache.
        eager: Whether to skip compiling and CUDA graphs on GPUs.
        gpus: GPUs that each load the whole model and do a part of the work.
        workers: CPU workers that each load the whole model, instead of GPUs.
        ray: Address of the Ray cluster, or auto for one that runs here.
        **params: Fields of `ClusterJob`.
    """
    if (gpus, workers, ray) == (None, None, None):
        workers = 2
    placement = make_placement({"gpus": gpus, "workers": workers, "ray": ray})
    assert placement is not None
    if placement.count is None:
        raise InputError("the number of GPUs in the Ray cluster is missing; pass --gpus N")
    from treegen.bench.cluster import ClusterJob
    from treegen.bench.shapes import shape_of
    from treegen.model.options import EngineOptions

    if model is None:
        shape_of(shape)
    options = EngineOptions(model=model or shape, dtype=dtype, memory=memory, eager=eager)
    _time_cluster(placement, options, ClusterJob(**params), shape=None if model else shape)


def _time_cluster(
    placement: "Placement", options: "EngineOptions", job: "ClusterJob", *, shape: str | None
) -> None:
    """Measure the same whole job on one worker and on all, and print the results."""
    from treegen.bench.cluster import ClusterBench
    from treegen.cli.terminal.render import echo, json_line, notice, print_table
    from treegen.report.tables import PrintableTable

    count = placement.count or 1
    with ClusterBench(job, placement, options, shape=shape) as bench:
        starts = {name: getattr(bench, name) for name in ("startup_seconds", "warm_up_seconds")}
        text = "{} workers: started in {:.1f} s, warmed up in {:.1f} s"
        notice(text.format(count, *starts.values()))
        times = []
        for workers in dict.fromkeys((1, count)):
            time = bench.time_job(workers)
            notice(f"{workers} workers: {time.tokens_per_second:,.0f} tokens/s")
            times.append(time)
    echo(
        f"{job.problems} problems x {job.samples} samples below {job.prefix} tokens, "
        f"{shape or options.model}, {'GPUs' if placement.device == 'cuda' else 'CPU workers'}"
    )
    one = times[0].tokens_per_second
    columns: dict[str, str | Callable[[ClusterTime], str]] = {
        "Workers": "{0.workers}",
        "tokens/s": "{0.tokens_per_second:,.0f}",
        "times one": lambda time: f"{time.tokens_per_second / one:.2f}",
        "seconds": "{0.seconds:.2f}",
        "prompt tokens": "{0.prompt_tokens:,}",
    }
    print_table(PrintableTable.of(times, columns))
    results = [asdict(time) | {"tokens_per_second": time.tokens_per_second} for time in times]
    json_line(
        {"bench": "cluster", "device": placement.device, "job": job, **starts, "results": results}
    )


HEADS: Decorator = int_list_option(
    "--heads",
    "Query heads, KV heads and head dimension.",
    default="8,1,128",
    metavar="Q,KV,DIM",
    once=False,
)


@click.command()
@int_list_option("--rows", "Query rows.", default="64,256,1024,4096")
@int_list_option("--prefix", "Keys that all rows share.", default="1024,4096,16384")
@int_list_option("--suffix", "Keys of each row after the prefix.", default="0,128,1024", minimum=0)
@HEADS
@int_option("--repeats", 20, "Number of timed calls.")
@add_options(*DEVICE)
def attention(
    rows: list[int],
    prefix: list[int],
    suffix: list[int],
    heads: list[int],
    repeats: int,
    **options: Any,
) -> None:
    """Time attention with and without sharing, on the grid of sizes of the Hydragen paper.

    \f
    Args:
        rows: Query rows.
        prefix: Keys that all rows share.
        suffix: Keys of each row after the prefix.
        heads: Query heads, KV heads and head dimension.
        repeats: Number of timed calls.
        **options: Values of the options `DEVICE`.
    """
    check_heads(heads)
    grid = [
        (number, shared, unshared) for unshared in suffix for shared in prefix for number in rows
    ]
    from treegen.bench.attention import Heads, measure
    from treegen.bench.table import attention_case_line, attention_table
    from treegen.cli.terminal.render import echo, json_line, notice, print_table

    sizes, results = Heads(*heads), []
    device, dtype, machine, rates = measure_rates(**options)
    for result in measure(grid, sizes, rates, device=device, dtype=dtype, repeats=repeats):
        notice(attention_case_line(result))
        results.append(result)
    echo("{} query heads, {} KV heads, width {}; ".format(*heads) + medians(repeats))
    print_table(attention_table(results))
    json_line(
        {
            "bench": "attention",
            "machine": machine,
            "ceilings": rates,
            "heads": sizes,
            "results": results,
        }
    )


def check_heads(heads: list[int]) -> None:
    """Raise InputError unless there are query heads, a divisor of their number, and a width."""
    if len(heads) != 3 or heads[0] % heads[1]:
        raise InputError(f"--heads must be Q,KV,DIM with Q a multiple of KV, got {heads!r}")


def measure_rates(*, dtype: str, device: str, ceiling_seconds: float | None) -> tuple[Any, ...]:
    """Print the machine and its rates; return the device, the type, the machine and the rates.

    Args:
        dtype: The type of numbers; "auto" is float32 on a CPU and bfloat16 on a GPU.
        device: The device; "auto" is a GPU if there is one.
        ceiling_seconds: Seconds per measurement; None for the default.
    """
    from treegen.bench import ceilings
    from treegen.bench.timing import describe_machine, headline
    from treegen.cli.terminal.render import echo
    from treegen.model.config import DTYPES, resolve_device

    target = resolve_device(device)
    usual = "float32" if target.type == "cpu" else "bfloat16"
    kind = DTYPES[usual if dtype == "auto" else dtype]
    machine, rates = describe_machine(target), ceilings.measure(target, kind, ceiling_seconds)
    echo(f"{headline(machine)}\n{rates}\n")
    return target, kind, machine, rates


def medians(repeats: int) -> str:
    """Return how times of the operator are measured, for the line above a table."""
    return f"cold caches; medians of {repeats}"


@click.group("bench")
def bench() -> None:
    """Measure treegen's speed on this machine."""


for _part in (attention, decode, prefill, cluster):
    bench.add_command(_part)


@click.command("selfcheck")
@option("--problems", "Number of problems, with 8 samples each.", "num_problems", default=16)
@add_option_groups("model")
@QUIET
def selfcheck(num_problems: int, **params: Any) -> None:
    """Run one job in several ways, and count the samples that stay the same.

    The ways are: in another order, in part, one problem alone, with few rows, with few pages, and
    resumed. The exit code is 1 if samples differ although treegen guarantees that they are equal:
    with --reproducible, or in float32 on a CPU.
    """
    from treegen import demo
    from treegen.cli.terminal.render import echo, json_line, tell
    from treegen.model.options import EngineOptions

    if num_problems < 3:
        raise InputError(f"--problems must be at least 3, got {num_problems}")
    choices = collect_choices(params)
    if "model" not in choices:
        tell(f"{demo.MODEL_NOTICE}; use --model for your own")
    engine = EngineOptions(**{"model": demo.NAME, **choices})
    from treegen.api.selfcheck import self_check

    outcome = self_check(engine, num_problems)
    echo(str(outcome.table))
    json_line(outcome.document)
    if outcome.is_broken:
        raise click.exceptions.Exit(1)
