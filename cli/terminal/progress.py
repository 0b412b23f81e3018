"""Displays the progress of a run: a live view on a terminal, plain lines in a log."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from treegen.cli.options.options import is_quiet
from treegen.cli.terminal.interrupts import Interrupted, received
from treegen.cli.terminal.render import notice, show_prompt, tell
from treegen.common.formatting import safe_text
from treegen.evals.pipeline.listener import Listener, Stop
from treegen.runs import graceful_signals

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

    from treegen.evals.config.base import BaseSettings
    from treegen.evals.progress.run_progress import RunProgress

_LINE_SECONDS: Final = 10.0  # between lines of a log while samples end
_DECODING_LINE_SECONDS: Final = 60.0  # between lines while no sample ends, but tokens are decoded
_MIN_LINES: Final = 10  # of a log, one for each tenth of the samples
_POLL_SECONDS: Final = 0.1  # between polls of a run


class Terminal(Listener):
    """The terminal of a user who typed a command."""

    def __init__(self, resume: str = "", flags: str = "") -> None:
        """Create the terminal of the running command.

        Args:
            resume: The command that continues a run.
            flags: Flags to append to that command.
        """
        self._resume, self._flags = resume, flags

    def warn(self, text: str) -> None:
        """Print a line to stderr."""
        notice(text)

    def tell(self, text: str) -> None:
        """Print a line to stderr, unless quiet."""
        tell(text)

    def loading(self, model: str) -> None:
        """Print that a model is being loaded, and suppress transformers' messages meanwhile."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        super().loading(model)

    def show_prompt(self, text: str) -> None:
        """Print a prompt."""
        show_prompt(text)

    def track(self, steps: "Iterator[RunProgress]", title: str) -> None:
        """Display the progress of the run."""
        show_progress(steps, title, quiet=is_quiet())

    @contextmanager
    def poll_interrupts(self) -> Iterator[Stop]:
        """Let the first signal end the work in progress, and then raise Interrupted."""
        with graceful_signals() as graceful:

            def stop() -> int | None:
                return received() or graceful()

            yield stop
            if signum := stop():
                raise Interrupted(signum)

    def count(
        self,
        begin: Callable[[Stop], Iterable[tuple[int, int]]],
        unit: str,
        again: str = "repeat the command",
    ) -> tuple[int, int]:
        """Consume an iterator of (stored, total) counts, displaying them.

        Args:
            begin: Returns the iterator, given a function that says whether to stop.
            unit: What is counted.
            again: How the user continues after a signal.

        Returns:
            The last counts: how many are stored, and how many there are.
        """
        done = planned = 0
        try:
            with self.poll_interrupts() as stop:
                for so_far in begin(stop):
                    done, planned = so_far
        except Interrupted as stopped:
            stopped.add_note(f"{done:,} of {planned:,} {unit} are stored; {again}")
            raise
        return done, planned

    def resume_command(self, path: Path | str, settings: "Sequence[BaseSettings]") -> str:
        """Return the command that continues the run."""
        if not self._resume:
            return f"finished results are in {path}"
        place = shlex.quote(str(path))
        flags = self._flags
        if any(chosen.runs_code for chosen in settings):
            flags += " --allow-task-code"
        if any(chosen.engine.trust_remote_code for chosen in settings):
            flags += " --trust-remote-code"
        return f"continue with: treegen {self._resume} --resume {place}{flags}"


def show_progress(steps: "Iterator[RunProgress]", name: str, *, quiet: bool) -> None:
    """Consume an iterator of progress, displaying it on stderr unless quiet.

    Args:
        steps: The progress of a run.
        name: The title of the run.
        quiet: Whether to display nothing.
    """
    if quiet:
        for _ in steps:
            pass
    elif sys.stderr.isatty():
        _draw_live(steps, name)
    else:
        _draw_lines(steps, name)


def _draw_lines(steps: "Iterator[RunProgress]", name: str) -> None:
    """Print a line for each tenth of the samples, and otherwise when something has changed."""
    printed = time.monotonic()
    last: RunProgress | None = None  # of the last line
    for now in steps:
        if last is None:  # a resumed run may start in the middle
            last = now
        waited = time.monotonic() - printed
        is_due = (now.done != last.done and waited >= _LINE_SECONDS) or (
            now.tokens != last.tokens and waited >= _DECODING_LINE_SECONDS
        )
        if _MIN_LINES * now.done // now.planned > _MIN_LINES * last.done // last.planned or is_due:
            printed, last = time.monotonic(), now
            now = now.update_estimate()  # the last update may be some samples ago
            percent = 100 * now.done // now.planned
            details = ", ".join(filter(None, (now.details, now.time_left)))
            notice(f"{name}: {now.done:,}/{now.planned:,} {now.unit} ({percent}%), {details}")
            if now.workers:
                notice("; ".join(map(str, now.workers)))


def _draw_live(steps: "Iterator[RunProgress]", name: str) -> None:
    """Consume an iterator of progress, and update a display of it on stderr.

    There is a bar with the remaining time. Below it are tokens per second, pages, the accuracy with
    its interval, and for each level of the tree the number of rows decoded below it.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    task = bar.add_task(safe_text(name).replace("\n", " "), total=None, left="")
    latest: RunProgress | None = None

    def draw() -> "RenderableType":
        if latest is None:
            return bar
        bar.update(task, completed=latest.done, total=latest.planned, left=latest.time_left)
        return _view(bar, latest)

    # Live redraws in its own thread, so the rate does not depend on the steps.
    with Live(get_renderable=draw, console=Console(stderr=True), refresh_per_second=4):
        due = 0.0
        for now in steps:
            if time.monotonic() >= due or now.done == now.planned:
                due, latest = time.monotonic() + _POLL_SECONDS, now


def _view(bar: "RenderableType", now: "RunProgress") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(rows: Sequence[Sequence[str]], *columns: str) -> Table:
        rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            justify: JustifyMethod = "left" if column == "worker" else "right"
            rich_table.add_column(column, justify=justify, header_style="dim")
        for row in rows:
            rich_table.add_row(*map(Text, row))
        return rich_table

    levels = [
        (
            f"{level.depth}",
            f"{level.segments:,}",
            f"{level.rows:,}",
            f"{level.kept_rows:,} rows" if level.kept_rows else "none",
        )
        for level in now.levels
    ]
    workers = [
        (
            safe_text(f"{worker.name} {worker.where}"),
            f"{worker.tokens_per_second:,.0f}",
            f"{worker.rows:,}",
            f"{worker.pages:,}/{worker.num_pages:,}",
            f"{worker.deaths:,}" if worker.deaths else "",
        )
        for worker in now.workers
    ]
    parts: list[RenderableType] = [bar, Text(now.details)]
    if levels:
        parts.append(table(levels, "level", "segments", "rows", "read once for"))
    if workers:
        parts.append(table(workers, "worker", "tokens/s", "rows", "pages", "restarts"))
    return Group(*parts)
