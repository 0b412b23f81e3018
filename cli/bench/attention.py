"""`treegen bench attention`: the attention operator alone."""

from typing import Any

import click

from treegen.cli.bench.options import DEVICE, count, counts
from treegen.cli.options.choices import is_number
from treegen.cli.options.options import add_options
from treegen.errors import InputError


def _levels(_: click.Context, __: click.Parameter, text: str | None) -> list[tuple[int, int]]:
    """Return the (keys, groups) pair of each level."""
    pairs = [] if text is None else [word.strip().split("x") for word in text.split(",")]
    if not all(len(pair) == 2 and all(map(is_number, pair)) for pair in pairs):
        raise InputError(
            f"--levels must be KEYSxGROUPS with commas between, such as 2048x1,128x64, got {text!r}"
        )
    return [(int(keys), int(groups)) for keys, groups in pairs]


@click.command()
@counts(
    "--rows", "Query rows. Default: 64,256,1024,4096, with --levels as many as the most groups."
)
@counts("--prefix", "Keys that all rows share. Default: 1024,4096,16384.")
@counts("--suffix", "Keys of each row's own. Default: 0,128,1024.", least=0)
@click.option(
    "--levels",
    metavar="KxG,...",
    callback=_levels,
    help="Time these levels instead: so many keys for each of so many groups of rows, "
    "such as 2048x1,512x32,128x1024.",
)
@counts(
    "--heads",
    "Query heads, KV heads and their width.",
    default="8,1,128",
    metavar="Q,KV,DIM",
    once=False,
)
@click.option(
    "--shape",
    metavar="NAME",
    help="Time latent attention with the heads of this model "
    "instead: glm-4.7-flash, deepseek-v2-lite, deepseek-v3 or tiny-mla. Default: prefix "
    "2048, suffix 0,1000.",
)
@count("--repeats", 20, "Calls that are timed.")
@add_options(*DEVICE)
def attention(
    rows: list[int] | None,
    prefix: list[int] | None,
    suffix: list[int] | None,
    levels: list[tuple[int, int]],
    heads: list[int],
    shape: str | None,
    **how: Any,
) -> None:
    """The attention operator on the paper's grid, against attention without sharing.

    With --levels, on a cascade of any depth, against the sum of what its levels take at least.
    With --shape, over latents, in each form beside its roofline.
    """
    if shape is not None and levels:
        raise InputError("give --shape or --levels, not both")
    if levels and not (prefix is suffix is None):
        raise InputError("give --levels or --prefix and --suffix, not both")
    most = max((groups for _, groups in levels), default=0)
    rows = rows or ([most] if levels else [64, 256, 1024, 4096])
    if min(rows) < most:
        raise InputError(
            f"--rows {min(rows)} cannot be divided among {most} groups of --levels; "
            f"give --rows {most} or more"
        )
    if len(heads) != 3 or heads[0] % heads[1]:
        raise InputError(f"--heads must be Q,KV,DIM with Q a multiple of KV, got {heads!r}")
    prefix = prefix or ([0] if levels else [2048] if shape else [1024, 4096, 16384])
    suffix = suffix or ([0] if levels else [0, 1000] if shape else [0, 128, 1024])
    grid = [(number, below, own) for own in suffix for below in prefix for number in rows]
    from treegen.bench.suite import time_attention
    from treegen.cli.terminal import render

    render.json_line(time_attention(render, grid, levels, heads, shape, **how))
