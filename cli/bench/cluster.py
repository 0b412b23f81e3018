"""`treegen bench cluster`: whole jobs on one worker and on several."""

from typing import Any

import click

from treegen.cli.bench.options import CHECKPOINT, count
from treegen.cli.options.choices import make_placement
from treegen.cli.options.options import JSON, add_option_groups
from treegen.errors import InputError


@click.command()
@add_option_groups("cluster")
@CHECKPOINT
@click.option(
    "--shape",
    default="tiny",
    show_default=True,
    metavar="NAME",
    help="Random weights of this shape, which each worker makes.",
)
@click.option("--dtype", default="auto", metavar="TYPE", help="auto, float32, bfloat16 or float16.")
@click.option("--memory", metavar="SIZE", help="For keys and values of each worker.")
@count("--problems", 64, "Problems below one prefix.")
@count("--samples", 16, "Samples per problem.")
@count("--prefix", 512, "Prompt tokens that all share.")
@count("--problem-tokens", 64, "Tokens of each problem.")
@count("--mean-tokens", 64, "Tokens of a sample on average, with random weights.")
@count("--max-tokens", None, "Tokens of a sample at most; default: four times the mean.")
@click.option("--eager", is_flag=True, help="On GPUs: no compiling, no CUDA graphs.")
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
    """The same whole job on one worker and on all: tokens per second, and how near to N times.

    On CPUs that share their cores, N workers are no N machines: measure that on GPUs.
    """
    if (gpus, workers, ray) == (None, None, None):
        workers = 2
    places = make_placement({"gpus": gpus, "workers": workers, "ray": ray})
    assert places is not None
    if places.count is None:
        raise InputError("say how many GPUs of the Ray cluster: --gpus N")
    from treegen.bench.suite import time_cluster
    from treegen.cli.terminal import render
    from treegen.model.options import EngineOptions

    options = EngineOptions(model=model or shape, dtype=dtype, memory=memory, eager=eager)
    wanted = None if model else shape
    render.json_line(time_cluster(render, places, options, shape=wanted, **params))
