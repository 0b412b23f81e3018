"""`treegen score`: score the samples of a run again, without its model."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import collect_choices, make_execution
from treegen.cli.options.options import (
    ALL_FILTERS,
    QUIET,
    RUN,
    add_option_groups,
    is_quiet,
    option,
)


@click.command("score")
@RUN
@add_option_groups("reading")
@option("--rejudge", "Run programs again, even if they have a stored verdict.")
@add_option_groups("arguments", "report", "execution")
@ALL_FILTERS
@QUIET
def command(run: Path, rejudge: bool, all_filters: bool, **params: Any) -> None:
    """Score the samples in the directory RUN again and rewrite its results.json.

    \f
    Args:
        run: The run directory.
        rejudge: Whether to run programs again that have a stored verdict.
        all_filters: Whether to show the results of every filter, not only of the first.
        **params: Options of votes, metrics and execution.
    """
    from treegen.cli.terminal import render
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.rescoring import rescore_run
    from treegen.report.run_settings import describe_results

    execution = make_execution(params, anew=rejudge)
    result = rescore_run(run, collect_choices(params), Terminal(), execution)
    if not is_quiet():
        render.show_report(result.results, result.report, all_filters=all_filters)
        render.pictures(result.report, run)
    if result.missing:
        planned = result.results["planned"]
        render.notice(f"{result.missing:,} of {planned:,} samples are not drawn yet")
    render.echo("")
    render.show_headline(describe_results(result.results, short=True), result.report, run)
    # The form of `treegen eval`, which may have several runs.
    render.json_line({"runs": [{"run": str(run), **render.without_parts(result.results)}]})
    render.exit_with_complaints([result.complaint] if result.complaint else [])
