"""`treegen bench score`: scoring of given texts below one prompt, against transformers."""

from typing import Any

import click

from treegen.cli.bench.options import count, shape_or_model
from treegen.cli.options.options import JSON
from treegen.errors import InputError


@click.command()
@click.option("--shape", metavar="NAME", help="Random weights of this shape, as for decode.")
@count("--layers", None, "Layers of the shape, in place of all.", metavar="N")
@click.option("--model", metavar="DIR|NAME", help="A checkpoint instead of a shape.")
@count("--texts", 64, "Texts below one prompt.")
@count("--tokens", 512, "Tokens of each text.")
@count("--prefix", 8192, "Tokens of the prompt.")
@count("--top", 256, "Likeliest tokens in the place of each token.", least=0)
@JSON
def score(shape: str | None, model: str | None, layers: int | None, **job: Any) -> None:
    """Score texts below one prompt on a CPU, beside transformers: seconds for each, and counts."""
    known = shape_or_model(shape, model, "llama3.2-1b")
    if layers is not None and model:
        raise InputError("--layers is for a shape, and a checkpoint has its own; leave it out")
    from treegen.bench.suite import time_score
    from treegen.cli.terminal import render

    render.json_line(time_score(render, known, model, layers, **job))
