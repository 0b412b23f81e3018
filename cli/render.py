"""What commands print: tables that can be pasted, notices, and the JSON line at the end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from treegen import demo
from treegen.cli.options import json_wanted
from treegen.errors import InputError, TreegenError
from treegen.evals.account import attention_line, sharing_line
from treegen.evals.tables import Cell, Grid, Table
from treegen.formats import safe_text
from treegen.report.heat_map import draw_text, save_png
from treegen.tasks import Report, Skipped

_UP, _DOWN, _PLUS_MINUS = "\u2191", "\u2193", "\u00b1"
_ASCII: Final = {ord(_UP): "^", ord(_DOWN): "v", ord(_PLUS_MINUS): "+"}
_SHOWN: Final = 5


def notice(text: str) -> None:
    """Print one line to stderr."""
    click.echo(safe_text(text).replace("\n", " "), err=True)


def demo_notice(given: Mapping[str, Any], models: Sequence[str]) -> None:
    """Say on stderr that the bundled model is used, where a user named none."""
    if "model" not in given and demo.NAME in models:
        notice(demo.MODEL_NOTICE if "data" in given else demo.NOTICE)


def skipped_rows(rows: Sequence[Skipped]) -> None:
    """Say on stderr which rows of the data cannot be run."""
    for row in rows[:_SHOWN]:
        notice(f"skipped: {row}")
    if len(rows) > _SHOWN:
        notice(f"skipped: {len(rows) - _SHOWN:,} more rows; results.json lists all of them")


def echo(text: str) -> None:
    """Print to stdout, in ASCII where that is all the stream can take."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    click.echo(text)


def show_prompt(text: str, *, quiet: bool) -> None:
    """Print a prompt; if only the JSON line may be on stdout, to stderr."""
    if quiet:
        click.echo(safe_text(text), err=True)
    else:
        echo(f"{safe_text(text)}\n")


def json_line(document: Mapping[str, Any]) -> None:
    """Print one JSON document in one line; nothing may be printed to stdout after it.

    On a terminal, people read what stands above it: there it is printed only if it was asked for.
    """
    if sys.stdout.isatty() and not json_wanted():
        return
    # All control characters but DEL are escaped by the encoder.
    click.echo(json.dumps(document, allow_nan=False).replace("\x7f", "\\u007f"))


def report_tables(
    results: Mapping[str, Any], report: Report | None, *, unit: str = "samples"
) -> None:
    """Print the metrics of a run in lm-eval's shape, the votes, and what sharing did.

    unit: what results["done"] counts.
    """
    if report is not None:
        echo(_metrics(report))
        if report.majority:
            echo("\n" + _majority(report))
        for table in report.tables:
            echo(f"\n{safe_text(table.title)}\n{_table(table)}")
        for grid in report.grids:
            echo(f"\n{_grid(grid)}")
        for line in (*_remarks(report), *_notes(results)):
            echo(line)
        echo("")
    usage = results["usage"]
    echo(sharing_line(usage))
    if told := attention_line(usage):
        echo(safe_text(told))
    echo(_time(usage))
    if usage.get("eager_because"):
        echo(safe_text(f"decode steps ran without CUDA graphs: {usage['eager_because']}"))
    if usage.get("uncompiled_because"):
        echo(safe_text(f"layers ran uncompiled: {usage['uncompiled_because']}"))
    echo(
        f"decoded tokens: {usage['decoded_tokens']:,} at {usage['tokens_per_second']:,.0f} per "
        f"second; {results['done']:,} of {results['planned']:,} {unit}"
    )


def _time(usage: Mapping[str, Any]) -> str:
    if "prefill_seconds" not in usage:  # searches note the whole time only
        return f"time: {usage['seconds']:,.2f} s"
    prefill, decode = usage["prefill_seconds"], usage["decode_seconds"]
    return f"time: prefill {prefill:,.2f} s, decode {decode:,.2f} s of {usage['seconds']:,.2f} s"


def pictures(report: Report | None, folder: Path) -> None:
    """Save the report's heat maps in a run directory; says so if the library for it is missing."""
    for number, grid in enumerate(report.grids if report is not None else ()):
        file = folder / ("heat_map.png" if number == 0 else f"heat_map_{number + 1}.png")
        try:
            save_png(grid, file)
        except InputError as error:
            notice(str(error))
            return
        echo(f"picture: {safe_text(str(file))}")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Return a table with pipes; right: the columns whose cells are numbers."""
    cells = [[_cell(text) for text in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        "|".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = "|".join(
        "-" * (width - 1) + ":" if i in right else "-" * width for i, width in enumerate(widths)
    )
    return "\n".join(f"|{line}|" for line in (lines[0], rule, *lines[1:]))


def _cell(text: str) -> str:
    return safe_text(text).replace("\n", " ").replace("|", "\\|")


def _metrics(report: Report) -> str:
    rows = [
        [
            f"{row.task} ({report.label})" if report.label else row.task,
            row.version,
            row.filter,
            "n/a" if row.num_fewshot is None else str(row.num_fewshot),
            row.metric,
            _UP if row.higher_is_better else _DOWN,
            _number(row.value),
            _PLUS_MINUS if row.stderr is not None else "",
            _number(row.stderr) if row.stderr is not None else "",
        ]
        for row in report.metrics
    ]
    head = ["Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"]
    return markdown(head, rows, right=(1, 3, 6, 8))


def _table(table: Table) -> str:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    return markdown(table.columns, rows, right=range(1, len(table.columns)))


def _text(cell: Cell) -> str:
    return _number(cell) if cell is None or isinstance(cell, float) else str(cell)


def _grid(grid: Grid) -> str:
    drawn = draw_text(grid)
    try:
        drawn.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        drawn = draw_text(grid, ascii=True)
    return safe_text(drawn)


def _majority(report: Report) -> str:
    rows = [
        [
            row.filter,
            str(row.k),
            _number(row.value),
            _PLUS_MINUS if row.stderr is not None else "",
            _number(row.stderr) if row.stderr is not None else "",
            _number(row.tie_rate),
        ]
        for row in report.majority
    ]
    return markdown(["Filter", "k", "maj@k", "", "Stderr", "Tie rate"], rows, right=(1, 2, 4, 5))


def _remarks(report: Report) -> list[str]:
    """Return why values are missing, and which problems have too few samples."""
    lines = {f"n/a: {row.metric}: {row.reason}" for row in report.metrics if row.reason}
    lines |= {f"n/a: maj@{row.k}: {row.reason}" for row in report.majority if row.reason}
    remarks = sorted(lines)
    if report.incomplete:
        some = ", ".join(f"{p.problem_id} ({p.num_samples})" for p in report.incomplete[:_SHOWN])
        more = ", ..." if len(report.incomplete) > _SHOWN else ""
        remarks.append(
            f"incomplete: {len(report.incomplete):,} problems have fewer samples than planned: "
            f"{some}{more}"
        )
    return [safe_text(line).replace("\n", " ") for line in remarks]


def _notes(results: Mapping[str, Any]) -> list[str]:
    notes = results.get("task", {}).get("notes", ())
    return [safe_text(note).replace("\n", " ") for note in notes]


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def failed(error: TreegenError) -> str:
    """Return an error's message for use within a line."""
    return safe_text(" ".join(str(error).split()))
