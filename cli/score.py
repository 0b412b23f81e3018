"""`treegen score`: judge the samples of a run again, without its model."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.typed.options import QUIET, asked_for, options_of, take_execution


@click.command("score")
@click.argument("run", type=click.Path(path_type=Path))
@options_of("reading")
@click.option("--rejudge", is_flag=True, help="Run programs again that have been judged.")
@options_of("arguments", "report", "execution")
@QUIET
def command(run: Path, quiet: bool, rejudge: bool, **params: Any) -> None:
    """Score the samples in the directory RUN again and rewrite its results.json."""
    from treegen.cli.terminal import render
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.running.again import score_again

    execution = take_execution(params, anew=rejudge)
    found = score_again(run, asked_for(params), Terminal(quiet=quiet), execution)
    if not quiet:
        render.show_report(found.results, found.report)
        render.pictures(found.report, run)
    if found.missing:
        planned = found.results["planned"]
        render.notice(f"{found.missing:,} of {planned:,} samples are not drawn yet")
    if not quiet:
        render.echo("")
    # The shape of `treegen eval`, which may have several runs.
    render.json_line({"runs": [{"run": str(run), **render.without_parts(found.results)}]})
    render.complain([found.complaint] if found.complaint else [])
