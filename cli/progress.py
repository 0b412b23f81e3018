"""Drawing how far a run is: a live line on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from treegen.cli.render import notice
from treegen.terminal import safe_text

if TYPE_CHECKING:
    from treegen.tasks.runner import Progress

_SECONDS: Final = 10.0  # between lines of a log, if nothing much happens
_LINES: Final = 10  # one for each such part of all samples


def draw(steps: "Iterator[Progress]", name: str, *, quiet: bool) -> None:
    """Use up an iterator of progress, drawing it to stderr unless quiet."""
    if quiet:
        for _ in steps:
            pass
    elif sys.stderr.isatty():
        _draw_live(steps, name)
    else:
        _draw_lines(steps, name)


def _draw_live(steps: "Iterator[Progress]", name: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[details]}", markup=False),
    )
    # Its own thread redraws a few times a second, however fast the steps are.
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(safe_text(name).replace("\n", " "), total=None, details="")
        due = 0.0
        latest = None
        for latest in steps:
            if time.monotonic() >= due:
                due = time.monotonic() + 0.1
                bar.update(
                    task, completed=latest.done, total=latest.planned, details=_details(latest)
                )
        if latest is not None:
            bar.update(task, completed=latest.done, total=latest.planned, details=_details(latest))


def _draw_lines(steps: "Iterator[Progress]", name: str) -> None:
    due = time.monotonic() + _SECONDS
    reached: int | None = None
    for now in steps:
        part = _LINES * now.done // now.planned
        if reached is None:  # a resumed run starts somewhere in the middle
            reached = part
        if part > reached or time.monotonic() >= due:
            due, reached = time.monotonic() + _SECONDS, part
            percent = 100 * now.done // now.planned
            notice(f"{name}: {now.done:,}/{now.planned:,} samples ({percent}%), {_details(now)}")


def _details(now: "Progress") -> str:
    accuracy = "" if now.accuracy is None else f", accuracy {now.accuracy:.3f}"
    if not now.num_pages:  # no model is at work
        return f"{now.rows:,} programs under way{accuracy}"
    return (
        f"{now.tokens_per_second:,.0f} tokens/s, {now.rows:,} rows, "
        f"{now.pages:,}/{now.num_pages:,} pages{accuracy}"
    )
