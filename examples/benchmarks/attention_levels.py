"""Attention over a cascade of levels: the operator's time compared with its roofline.

A level has some groups, all with the same number of keys. The rows are divided evenly among them.
The figures of docs/internals/measurements.md come from commands such as

    python examples/benchmarks/attention_levels.py --levels 2048x1,512x32,128x1024 --heads 32,8,128
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import click
import torch

from treegen.bench.attention import Cascade, Heads, LevelShape
from treegen.bench.ceilings import Ceilings
from treegen.bench.table import format_us, skip_reasons
from treegen.bench.timing import Spread, Stopwatch
from treegen.cli.bench import HEADS, check_heads, measure_rates, medians
from treegen.cli.bench.options import DEVICE, int_list_option, int_option
from treegen.cli.main import script
from treegen.cli.options.choices import is_number
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.errors import InputError
from treegen.model.memory import empty_device_cache
from treegen.report.tables import PrintableTable


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The result of one cascade; times in microseconds, spreads over repeats.

    rows: query rows.
    parts: the levels.
    times: by implementation.
    floor_us: the minimum time of all levels, one after another.
    ratios: by implementation, the median time over the floor.
    error: see `Cascade.check`.
    skipped: what was not timed, and why.
    """

    rows: int
    parts: tuple[LevelShape, ...]
    times: dict[str, Spread]
    floor_us: float
    ratios: dict[str, float]
    error: float
    skipped: dict[str, str]


def measure(
    rows: Sequence[int],
    parts: Sequence[LevelShape],
    heads: Heads,
    ceilings: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> Iterator[CascadeResult]:
    """Time one cascade for several numbers of rows.

    Args:
        rows: The numbers of query rows to time.
        parts: The levels of the cascade.
        heads: The heads of the attention layer.
        ceilings: The device's sustained rates, for the minimum times.
        device: The device to measure.
        dtype: The type of queries, keys and values.
        repeats: Timed calls of each implementation. Default: 20.

    Raises:
        NumericsError: a result is wrong.
        CapacityError: the keys do not fit.
    """
    stopwatch = Stopwatch(device)
    for number in rows:
        cascade = Cascade(number, parts, heads, device, dtype)
        error, skipped = cascade.check()
        times = cascade.times(stopwatch, repeats, skipped)
        floor_us = cascade.floor(ceilings) * 1e6
        ratios = {name: time.median / floor_us for name, time in times.items()}
        yield CascadeResult(number, tuple(parts), times, floor_us, ratios, error, skipped)
        del cascade
        empty_device_cache(device)


def cascade_line(result: CascadeResult) -> str:
    """Return one result as one line, to print when it arrives."""
    times = ", ".join(
        f"{name} {spread.median:,.1f} us, {result.ratios[name]:.2f} times the floor"
        for name, spread in result.times.items()
    )
    return f"{result.rows:,} rows, {_levels(result)}: {times}"


def cascade_table(results: Sequence[CascadeResult]) -> PrintableTable:
    """Return a table of cascades with each implementation, with the minimum time of the levels."""
    columns: dict[str, str | Callable[[CascadeResult], str]] = {
        "Rows": "{0.rows:,}",
        "Levels, keys x groups": _levels,
        "floor us": "{0.floor_us:,.1f}",
    }
    for name in dict.fromkeys(name for r in results for name in r.times):
        columns |= {f"{name} {title}": partial(text, name) for title, text in _BY_NAME.items()}
    lines = skip_reasons((f"{r.rows:,} rows, {_levels(r)}", r.skipped) for r in results)
    return PrintableTable.of(results, columns, words=["Levels, keys x groups"], lines=lines)


_BY_NAME: Final[dict[str, Callable[[str, CascadeResult], str]]] = {
    "us": lambda name, r: format_us(r.times.get(name)),
    "low-high": lambda name, r: _range(r.times[name]) if name in r.times else "",
    "times the floor": lambda name, r: f"{r.ratios[name]:.2f}" if name in r.ratios else "",
}
"""Columns of each implementation."""


def _range(spread: Spread) -> str:
    return f"{spread.low:,.1f}-{spread.high:,.1f}"


def _levels(result: CascadeResult) -> str:
    return " + ".join(f"{part.keys:,} x {part.groups:,}" for part in result.parts)


def _read_levels(_: click.Context, __: click.Parameter, text: str) -> list[LevelShape]:
    pairs = [word.strip().split("x") for word in text.split(",")]
    if not all(len(pair) == 2 and all(map(is_number, pair)) for pair in pairs):
        raise InputError(
            "--levels must be a comma-separated list of KEYSxGROUPS, such as 2048x1,128x64, "
            f"got {text!r}"
        )
    return [LevelShape(int(keys), int(groups)) for keys, groups in pairs]


@script
@click.option(
    "--levels",
    metavar="KxG,...",
    default="2048x1,512x32,128x1024",
    show_default=True,
    callback=_read_levels,
    help="So many keys for each of so many groups of rows.",
)
@int_list_option("--rows", "Query rows. Default: as many as the most groups.")
@HEADS
@int_option("--repeats", 20, "Calls that are timed.")
@add_options(*DEVICE)
def main(
    levels: list[LevelShape], rows: list[int] | None, heads: list[int], repeats: int, **options: Any
) -> None:
    """The attention operator on a cascade of any depth, against what its levels take at least."""
    check_heads(heads)
    max_groups = max(level.groups for level in levels)
    rows = rows or [max_groups]
    if min(rows) < max_groups:
        raise InputError(
            f"--rows must be at least {max_groups}, the largest number of groups in --levels, got "
            f"{min(rows)}"
        )
    device, dtype, machine, rates = measure_rates(**options)
    sizes, results = Heads(*heads), []
    for result in measure(rows, levels, sizes, rates, device=device, dtype=dtype, repeats=repeats):
        notice(cascade_line(result))
        results.append(result)
    echo("{} query heads, {} KV heads, width {}; ".format(*heads) + medians(repeats))
    print_table(cascade_table(results))
    json_line(
        {
            "bench": "levels",
            "machine": machine,
            "ceilings": rates,
            "heads": sizes,
            "results": results,
        }
    )


if __name__ == "__main__":
    main()
