"""Prints notices, text, tables, pictures, and the JSON document of a command."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from treegen.cli.options.options import is_json_requested, is_quiet
from treegen.cli.terminal.flags import rename_arguments
from treegen.common.formatting import format_table, safe_text
from treegen.errors import InputError, Message
from treegen.evals.statistics.tables import Table
from treegen.report.load import load_run
from treegen.report.plots.heat_map import save_png
from treegen.report.run_settings import describe_results
from treegen.report.tables import PrintableTable, headline_text
from treegen.report.text import DOWN, UP, run_text
from treegen.report.view import RunView
from treegen.tasks import Report

_ASCII: Final = {ord(UP): "^", ord(DOWN): "v"}


def notice(text: str) -> None:
    """Print one line to stderr."""
    click.echo(safe_text(in_flags(text)).replace("\n", " "), err=True)


def tell(text: str) -> None:
    """Print one line to stderr, unless the command has --quiet."""
    if not is_quiet():
        notice(text)


def in_flags(text: str) -> str:
    """Return a library message with argument names replaced by the running command's flags."""
    ctx = click.get_current_context(silent=True)
    return rename_arguments(text, None if ctx is None else ctx.command)


def read_run(path: Path, reading: Mapping[str, Any]) -> RunView:
    """Read a run with further arguments of the reader, and print its notices."""
    view = load_run(path, **reading)
    for line in view.notices:
        tell(line)
    return view


def echo(text: str, *, always: bool = False) -> None:
    """Print to stdout, in ASCII if the stream cannot encode the text.

    With --quiet nothing is printed, nor with --json, because stdout then holds the JSON document
    alone.

    Args:
        text: The text.
        always: Whether to print it nevertheless.
    """
    if not always and (is_json_requested() or is_quiet()):
        return
    if not encodable(text):
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    click.echo(text)


def encodable(text: str) -> bool:
    """Return whether stdout can encode a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def show_prompt(text: str) -> None:
    """Print a prompt to stdout, or to stderr if stdout is reserved for the JSON document."""
    if is_quiet() or is_json_requested():
        click.echo(safe_text(text), err=True)
    else:
        echo(f"{safe_text(text)}\n")


def print_table(table: PrintableTable) -> None:
    """Print a table: drawn on a terminal, in Markdown elsewhere."""
    if sys.stdout.isatty() and not is_json_requested():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        rich_table = Table()
        for column, title in enumerate(table.head):
            rich_table.add_column(
                Text(title), justify="right" if column in table.numbers else "left"
            )
        for row in table.rows:
            rich_table.add_row(*(Text(safe_text(cell)) for cell in row))
        Console(file=sys.stdout, highlight=False).print(rich_table)
    else:
        echo(format_table(table.head, table.rows, table.numbers))
    for remark in table.lines:
        echo(safe_text(remark).replace("\n", " "))


def json_line(document: Mapping[str, Any]) -> None:
    """Print a command's results as one line of JSON if the user asked for it by --json.

    Args:
        document: The results; dataclasses become objects with their fields.
    """
    if not is_json_requested():
        return
    # The encoder escapes all control characters except DEL.
    text = json.dumps(document, allow_nan=False, default=asdict)
    click.echo(text.replace("\x7f", "\\u007f"))


def without_parts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results without the records of their parts, which are many."""
    return {name: value for name, value in results.items() if name != "parts"}


def show_report(
    results: Mapping[str, Any],
    report: Report | None,
    *,
    title: str = "",
    unit: str = "samples",
    all_filters: bool = False,
) -> None:
    """Print the results of a run; see `treegen.report.text.run_text`.

    Args:
        results: The results.
        report: The report of the run; None for none.
        title: The line above, which says what the run is; by default it follows from the results.
        unit: The unit of the counts. Default: "samples".
        all_filters: Whether to show every filter, rather than the first of each task.
    """
    if notes := results.get("task", {}).get("notes"):
        results = {**results, "task": {**results["task"], "notes": list(map(in_flags, notes))}}
    if report is not None:
        report = replace(report, tables=tuple(map(_in_flags, report.tables)))
    echo(title or describe_results(results))
    text = run_text(
        results,
        report,
        unit=unit,
        ascii=not encodable("\u2591"),
        all_filters=all_filters,
        more="--all-filters shows them",
    )
    echo(f"\n{text}")


def _in_flags(table: Table) -> Table:
    """Return a table whose messages name the running command's flags."""
    rows = (tuple(in_flags(c) if isinstance(c, Message) else c for c in r) for r in table.rows)
    return replace(table, rows=tuple(rows))


def show_headline(title: str, report: Report | None, path: Path) -> None:
    """Print the last line about a run: its headline numbers, and where it is.

    Args:
        title: The task and the model.
        report: The report of the run; None for none.
        path: The directory of the run.
    """
    echo(safe_text(f"{title}: {headline_text(report)}; run: {path}").replace("\n", " "))


def exit_with_complaints(complaints: Sequence[str], code: int = 1) -> None:
    """Print each complaint to stderr, and exit with a code if there are any."""
    for complaint in complaints:
        notice(f"Error: {in_flags(complaint)}")
    if complaints:
        raise SystemExit(code)


def save_heat_maps(report: Report | None, folder: Path) -> None:
    """Save the report's heat maps in a run directory; print a notice if a library is missing."""
    for number, grid in enumerate(report.grids if report is not None else ()):
        file = folder / ("heat_map.png" if number == 0 else f"heat_map_{number + 1}.png")
        try:
            save_png(grid, file)
        except InputError as error:
            notice(error.message)
            return
        echo(f"picture: {safe_text(str(file))}")
