"""`treegen score`: judge the samples of a run again, without its model."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.judging import check_of_use, complaint, judge_rest, take_execution
from treegen.cli.options import CONTEXT, QUIET, asked_for, options_of
from treegen.common.formats import safe_text

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.evals.judged.execution import Execution, Judging
    from treegen.runs import RunDir


@click.command("score", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@click.option("--rejudge", is_flag=True, help="Run programs again that have been judged.")
@options_of("arguments", "report", "execution")
@QUIET
def command(run: Path, quiet: bool, rejudge: bool, **params: Any) -> None:
    """Score the samples in the directory RUN again and rewrite its results.json."""
    from treegen.cli.render import echo, json_line, notice, pictures
    from treegen.cli.tables import report_tables
    from treegen.errors import RunInUseError
    from treegen.evals.asked.settings import settle, stored_choices
    from treegen.evals.identity import check_same_data
    from treegen.evals.job import load_job
    from treegen.evals.judged.results import results_of
    from treegen.runs import RunDir

    execution = take_execution(params, anew=rejudge)
    with RunDir.open(run) as opened, ExitStack() as stack:
        for line in opened.notices:
            notice(line)
        stored = {**stored_choices(opened.info), "score": True}
        job = load_job(settle(asked_for(params), stored))
        check_of_use([job.task], execution)
        check_same_data(job, opened.info.identity, str(run))
        judging = _judge(job, opened, execution, stack, quiet=quiet)
        results, report = results_of(job, opened, judging)
        try:
            opened.write_results(results)
        except RunInUseError as error:
            notice(f"results.json is left as it is: {error}")
        if not quiet:
            report_tables(results, report)
            pictures(report, run)
        if opened.missing > 0:
            notice(f"{opened.missing:,} of {opened.info.planned:,} samples are not drawn yet")
        del results["parts"]
        if not quiet:
            echo("")
        json_line({"run": str(run), **results})
        if told := complaint(job, opened, judging):
            click.echo(safe_text(f"Error: {told}"), err=True)
            raise SystemExit(1)


def _judge(
    job: "Job",
    run: "RunDir",
    execution: "Execution | None",
    stack: ExitStack,
    *,
    quiet: bool,
) -> "Judging | None":
    """Judge the programs of a run that lack a verdict; None if the task has no programs."""
    from treegen.cli.render import notice
    from treegen.errors import InputError
    from treegen.evals.judged.execution import executing

    task = executing(job.task)
    if task is None:
        return None
    judging = task.judging(run, execution)
    stack.callback(judging.close)
    for record in run.records():
        judging.add(record)
    if judging.missing and execution is None:
        raise InputError(
            f"{judging.missing:,} samples of {job.task.name} are not judged yet, and judging runs "
            "what the model wrote; allow it with --allow-code-execution"
        )
    if judging.missing:
        for line in judging.prepare():
            if not quiet:
                notice(line)
        judge_rest(job, run, judging, quiet=quiet)
    return judging
