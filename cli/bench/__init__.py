"""`treegen bench`: measure this machine, and print the measurements."""

import click

from treegen.cli.bench.attention import attention
from treegen.cli.bench.cluster import cluster
from treegen.cli.bench.device import decode, monkeys, paper
from treegen.cli.bench.options import CHECKPOINT, count
from treegen.cli.bench.prefill import prefill
from treegen.cli.bench.score import score
from treegen.cli.options.options import JSON
from treegen.errors import InputError


@click.group(name="bench")
def command() -> None:
    """Measure treegen on this machine."""


for _part in (attention, decode, prefill, score, paper, monkeys, cluster):
    command.add_command(_part)


@command.command()
@CHECKPOINT
@count("--samples", 40, "Samples per problem.")
@count("--problems", 4, "Problems.")
@count("--max-tokens", 64, "Tokens per sample.")
@JSON
def engine(model: str | None, **sizes: int) -> None:
    """Host time per decode step, pages in use, and tokens per second against transformers."""
    from treegen.bench.suite import time_engine
    from treegen.cli.terminal import render

    render.json_line(time_engine(render, model, **sizes))


@command.command()
@CHECKPOINT
@count("--problems", 64, "Searches at once.")
@count("--samples", 4, "Thoughts per node.")
@count("--breadth", 3, "Thoughts that go on per level.")
@count("--depth", 4, "Levels.")
@count("--step-tokens", 16, "Tokens per thought.")
@click.option(
    "--methods",
    is_flag=True,
    help="A beam against Monte Carlo tree search instead, at equal tokens.",
)
@count("--repeats", 1, "With --methods: seconds are the medians of so many runs, which take turns.")
@JSON
def search(model: str | None, methods: bool, repeats: int, **sizes: int) -> None:
    """Tree of thought with live caches, against prompting the text of every node anew."""
    if repeats > 1 and not methods:
        raise InputError("--repeats is for --methods; give both, or leave it out")
    from treegen.bench.suite import time_methods, time_search
    from treegen.cli.terminal import render

    if methods:
        render.json_line(time_methods(render, model, repeats=repeats, **sizes))
    else:
        render.json_line(time_search(render, model, **sizes))
