"""Drawing how far a run is: a live line on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from treegen.cli.live import details, draw_live, time_left
from treegen.cli.render import notice

if TYPE_CHECKING:
    from treegen.evals.progress import Progress

_SECONDS: Final = 10.0  # between lines of a log, if nothing much happens
_LINES: Final = 10  # one for each such part of all samples


def draw(steps: "Iterator[Progress]", name: str, *, quiet: bool) -> None:
    """Use up an iterator of progress, drawing it to stderr unless quiet."""
    if quiet:
        for _ in steps:
            pass
    elif sys.stderr.isatty():
        draw_live(steps, name)
    else:
        _draw_lines(steps, name)


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
            told = ", ".join(filter(None, (details(now), time_left(now))))
            notice(f"{name}: {now.done:,}/{now.planned:,} {now.unit} ({percent}%), {told}")
