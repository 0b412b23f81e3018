"""Print notices, text, pictures, and the JSON line at the end of a command."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from treegen import demo
from treegen.cli.options import json_wanted
from treegen.common.formats import safe_text
from treegen.errors import InputError, TreegenError
from treegen.report.plots.heat_map import save_png
from treegen.tasks import Report, Skipped

UP, DOWN, PLUS_MINUS = "\u2191", "\u2193", "\u00b1"
_ASCII: Final = {ord(UP): "^", ord(DOWN): "v", ord(PLUS_MINUS): "+"}
_SHOWN: Final = 5


def notice(text: str) -> None:
    """Print one line to stderr."""
    click.echo(safe_text(text).replace("\n", " "), err=True)


def demo_notice(given: Mapping[str, Any], models: Sequence[str]) -> None:
    """Say on stderr that the bundled model is used, if the user named none."""
    if "model" not in given and demo.NAME in models:
        notice(demo.MODEL_NOTICE if "data" in given else demo.NOTICE)


def skipped_rows(rows: Sequence[Skipped]) -> None:
    """Say on stderr which lines of the data cannot be run."""
    for row in rows[:_SHOWN]:
        notice(f"skipped: {row}")
    if len(rows) > _SHOWN:
        notice(f"skipped: {len(rows) - _SHOWN:,} more rows; results.json lists all of them")


def echo(text: str) -> None:
    """Print to stdout, in ASCII if the stream takes nothing else."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    click.echo(text)


def show_prompt(text: str, *, quiet: bool) -> None:
    """Print a prompt to stdout, or to stderr if stdout is for the JSON line alone."""
    if quiet:
        click.echo(safe_text(text), err=True)
    else:
        echo(f"{safe_text(text)}\n")


def json_line(document: Mapping[str, Any]) -> None:
    """Print one JSON document in one line; nothing may be printed to stdout after it.

    On a terminal it is printed only if the user asked for it, because people read what is above it.
    """
    if sys.stdout.isatty() and not json_wanted():
        return
    # The encoder escapes all control characters but DEL.
    click.echo(json.dumps(document, allow_nan=False).replace("\x7f", "\\u007f"))


def pictures(report: Report | None, folder: Path) -> None:
    """Save the report's heat maps in a run directory; print a notice if a library is missing."""
    for number, grid in enumerate(report.grids if report is not None else ()):
        file = folder / ("heat_map.png" if number == 0 else f"heat_map_{number + 1}.png")
        try:
            save_png(grid, file)
        except InputError as error:
            notice(str(error))
            return
        echo(f"picture: {safe_text(str(file))}")


def failed(error: TreegenError) -> str:
    """Return an error's message in one line, safe for a terminal."""
    return safe_text(" ".join(str(error).split()))
