"""`treegen replay`: what early stopping would have saved in a run that drew all samples."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import QUIET, RUN, add_option_groups, option


@click.command("replay")
@RUN
@option(
    "--stop-batch",
    "Samples of a problem until the rule is asked again.",
    type=click.IntRange(min=1),
    default=8,
)
@option(
    "--chance",
    "Of the leading answer to stay ahead; may be repeated.",
    "chances",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    multiple=True,
)
@option("--filter NAME", "Read answers by this filter.", "filter_name")
@add_option_groups("reading")
@QUIET
def command(
    run: Path,
    stop_batch: int,
    chances: tuple[float, ...],
    filter_name: str | None,
    **reading: Any,
) -> None:
    """Say what `--stop-when decided` would have saved of the run in RUN, and what it would cost.

    The rule is replayed on the run's samples in 32 random orders. Intervals are over problems, and
    differences are to the vote of all samples on the same problems.
    """
    from treegen.cli.terminal.render import echo, json_line, read_run
    from treegen.report.run_document import filter_of
    from treegen.report.run_settings import describe_view
    from treegen.report.stopping_savings import CHANCES, get_replay_problems, savings

    view = read_run(run, reading)
    drawn = get_replay_problems(view, filter_of(view, filter_name))
    groups = savings(drawn, batch=stop_batch, chances=chances or CHANCES, problems=view.problems)
    for text in (describe_view(view), *groups):
        echo(f"{text}\n")
    json_line({"run": str(run), "stop_batch": stop_batch, "groups": [asdict(g) for g in groups]})
