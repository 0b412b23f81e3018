"""`treegen bench cluster`: whole jobs on one worker and on several."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.bench.options import CHECKPOINT, count
from treegen.cli.options.choices import make_placement
from treegen.cli.options.options import JSON, add_option_groups, option
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
@count("--problems", 64, "Problems below one prefix.")
@count("--samples", 16, "Samples per problem.")
@count("--prefix", 512, "Prompt tokens that all problems share.")
@count("--problem-tokens", 64, "Tokens of each problem.")
@count("--mean-tokens", 64, "Mean tokens per sample, with random weights.")
@count("--max-tokens", None, "Maximum tokens per sample. Default: four times the mean.")
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
    places = make_placement({"gpus": gpus, "workers": workers, "ray": ray})
    assert places is not None
    if places.count is None:
        raise InputError("the number of GPUs in the Ray cluster is missing; pass --gpus N")
    from treegen.bench.cluster import ClusterJob
    from treegen.bench.shapes import shape_of
    from treegen.model.options import EngineOptions

    if model is None:
        shape_of(shape)
    options = EngineOptions(model=model or shape, dtype=dtype, memory=memory, eager=eager)
    _time_cluster(places, options, ClusterJob(**params), shape=None if model else shape)


def _time_cluster(
    places: "Placement", options: "EngineOptions", job: "ClusterJob", *, shape: str | None
) -> None:
    """Measure the same whole job on one worker and on all, and print the results."""
    from treegen.bench.cluster import ClusterBench
    from treegen.cli.terminal.render import echo, json_line, notice, print_table
    from treegen.report.tables import PrintableTable

    count = places.count or 1
    with ClusterBench(job, places, options, shape=shape) as bench:
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
        f"{shape or options.model}, {'GPUs' if places.device == 'cuda' else 'CPU workers'}"
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
        {
            "bench": "cluster",
            "device": places.device,
            "job": asdict(job),
            **starts,
            "results": results,
        }
    )
