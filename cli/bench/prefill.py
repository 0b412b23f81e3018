"""`treegen bench prefill`: small prefill passes compared with their roofline."""

from typing import Any

import click

from treegen.cli.bench.options import ENGINE, count, counts, shape_or_model
from treegen.cli.options.options import add_options


@click.command()
@click.option("--shape", metavar="NAME", help="Random weights of this shape, as for decode.")
@counts("--tokens", "Tokens of a pass.", default="8,64,128,256,512")
@count("--prefix", 1000, "Prompt tokens that are there already.")
@count("--passes", 64, "Passes of a run, one after another.")
@add_options(*ENGINE)
def prefill(shape: str | None, model: str | None, tokens: list[int], **options: Any) -> None:
    """Passes over a few prompt tokens, as searches need them: milliseconds, and the least time."""
    known = shape_or_model(shape, model, "llama3-8b")
    from treegen.bench.suite import time_prefill
    from treegen.cli.terminal import render

    render.json_line(time_prefill(render, known, model, tokens, **options))
