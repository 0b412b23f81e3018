"""`treegen bench attention`: the attention operator alone."""

from dataclasses import asdict
from typing import Any

import click

from treegen.cli.bench.options import DEVICE, count, counts
from treegen.cli.options.options import Decorator, add_options
from treegen.errors import InputError

HEADS: Decorator = counts(
    "--heads",
    "Query heads, KV heads and head dimension.",
    default="8,1,128",
    metavar="Q,KV,DIM",
    once=False,
)


@click.command()
@counts("--rows", "Query rows.", default="64,256,1024,4096")
@counts("--prefix", "Keys that all rows share.", default="1024,4096,16384")
@counts("--suffix", "Keys of each row after the prefix.", default="0,128,1024", least=0)
@HEADS
@count("--repeats", 20, "Number of timed calls.")
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
            "ceilings": asdict(rates),
            "heads": asdict(sizes),
            "results": [asdict(result) for result in results],
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
