"""`treegen score`: judge the samples of a run again, without its model."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options import CONTEXT, QUIET, asked_for, options_of


@click.command("score", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@options_of("arguments", "report")
@QUIET
def command(run: Path, quiet: bool, **params: Any) -> None:
    """Score the samples in the directory RUN again and rewrite its results.json."""
    from treegen.cli.render import echo, json_line, notice, pictures, report_tables
    from treegen.runs import RunDir
    from treegen.tasks.job import check_same_data, load_job
    from treegen.tasks.runner import write_results
    from treegen.tasks.settings import settle, stored_choices

    with RunDir.open(run) as opened:
        for line in opened.notices:
            notice(line)
        stored = {**stored_choices(opened.info), "score": True}
        job = load_job(settle(asked_for(params), stored))
        check_same_data(job, opened.info.identity, str(run))
        results, report = write_results(job, opened)
        if not quiet:
            report_tables(results, report)
            pictures(report, run)
        if opened.missing > 0:
            notice(f"{opened.missing:,} of {opened.info.planned:,} samples are not drawn yet")
        del results["parts"]
        if not quiet:
            echo("")
        json_line({"run": str(run), **results})
