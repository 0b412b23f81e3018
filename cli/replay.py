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
    "Samples per problem between two checks of the rule.",
    type=click.IntRange(min=1),
    default=8,
)
@option(
    "--chance",
    "Probability P of decided:P; may be repeated. Default: 0.7, 0.8, 0.9, 0.95 and 0.99.",
    "chances",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    multiple=True,
)
@option("--filter NAME", "Extract answers by this filter.", "filter_name")
@add_option_groups("reading")
@QUIET
def command(
    run: Path,
    stop_batch: int,
    chances: tuple[float, ...],
    filter_name: str | None,
    **reading: Any,
) -> None:
    """Estimate what `--stop-when decided` would have saved in RUN, and how the vote would change.

    The command applies the rule to 32 random orders of each problem's samples. Intervals are over
    problems. Each difference compares a vote with the vote of all samples of the same problems.

    \f
    Args:
        run: The run directory.
        stop_batch: Samples per problem between two checks of the rule.
        chances: Probabilities P of the rule decided:P.
        filter_name: Name of the filter that extracts answers.
        **reading: Options of the group "reading", as for `load_run`.
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
