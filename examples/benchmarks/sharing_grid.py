"""Whether sharing ever costs more than it saves: a grid of prefixes and rows.

The table of docs/internals/measurements.md comes from

    python examples/benchmarks/sharing_grid.py --shape llama3.2-1b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from treegen.bench.decode import WorkloadResult
from treegen.bench.workloads import Case, Workload
from treegen.cli.bench.decode import run_cases
from treegen.cli.bench.options import RUNS, int_list_option, int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.report.tables import PrintableTable

TIME_LIMIT: Final = 5.0
"""Seconds; a whole grid takes minutes with this limit of a run."""
NEVER_SLOWER: Final = 0.97
"""Lowest ratio of speed with sharing to speed without that noise explains."""


def grid_cases(rows: Sequence[int], prefixes: Sequence[int], new_tokens: int) -> list[Case]:
    """Return every number of rows below every prefix, with automatic sharing and without sharing.

    Args:
        rows: Numbers of rows decoded at once.
        prefixes: Lengths of the prefix, in tokens.
        new_tokens: Tokens of each sample.
    """
    return [
        Case(
            Workload("grid", prefix=prefix, new_tokens=new_tokens, samples=number, max_rows=number),
            ("auto", "off"),
        )
        for prefix in prefixes
        for number in rows
    ]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Decode speed with automatic sharing over speed without sharing.

    shared: whether the engine chose to share; if not, both modes do the same work.
    ratio: None if one of the two modes did not run.
    """

    rows: int
    prefix: int
    shared: bool
    ratio: float | None

    @property
    def is_slower(self) -> bool:
        """Whether sharing cost more than noise."""
        return self.shared and self.ratio is not None and self.ratio < NEVER_SLOWER


def ratios(results: Sequence[WorkloadResult]) -> list[Ratio]:
    """Return the ratio of each pair of a grid's results, from their median steps, in order."""
    without = {r.workload: r for r in results if r.mode == "off"}
    pairs = []
    for result in results:
        if result.mode != "auto":
            continue
        shared, off = result.step_ms, without[result.workload].step_ms
        pairs.append(
            Ratio(
                result.rows,
                result.workload.prefix,
                bool(result.levels),
                off.median / shared.median if shared and off else None,
            )
        )
    return pairs


def ratio_table(ratios: Sequence[Ratio]) -> PrintableTable:
    """Return a table of speed with sharing over speed without, prefixes down and rows across."""
    columns = sorted({ratio.rows for ratio in ratios})
    cells = {(ratio.prefix, ratio.rows): ratio for ratio in ratios}

    def text(prefix: int, rows: int) -> str:
        cell = cells.get((prefix, rows))
        if cell is None or cell.ratio is None:
            return ""
        return f"{cell.ratio:.2f}{'' if cell.shared else ' (off)'}{' !' if cell.is_slower else ''}"

    return PrintableTable(
        ("Prefix \\ rows", *(f"{rows:,}" for rows in columns)),
        tuple(
            (f"{prefix:,}", *(text(prefix, rows) for rows in columns))
            for prefix in sorted({ratio.prefix for ratio in ratios})
        ),
        tuple(range(len(columns) + 1)),
        lines=(
            "(off): the engine chose not to share, both are the same work; !: slower by more than "
            "noise",
        ),
    )


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: llama3-8b.")
@int_list_option("--rows", "Samples decoded at once.", default="1,4,16,64,256,1024,4096")
@int_list_option("--prefix", "Prompt tokens that all share.", default="64,256,1024,4096,16384")
@int_option("--new-tokens", 16, "Tokens of each sample.", minimum=2)
@add_options(*RUNS)
def main(
    shape: str | None, rows: list[int], prefix: list[int], new_tokens: int, **options: Any
) -> None:
    """Sharing as the engine chooses it against none, for each prefix and number of rows.

    Runs that would take 5 s or more are left out, unless --time-limit says otherwise.
    """
    options["time_limit"] = options["time_limit"] or TIME_LIMIT
    shape = shape_or_model(shape, options["model"], "llama3-8b")
    results, document = run_cases(grid_cases(rows, prefix, new_tokens), shape, options)
    pairs = ratios(results)
    echo("\nDecode speed with sharing over speed without")
    print_table(ratio_table(pairs))
    never_slower = [asdict(ratio) for ratio in pairs]
    json_line({"bench": "grid", **document, "never_slower": never_slower})


if __name__ == "__main__":
    main()
