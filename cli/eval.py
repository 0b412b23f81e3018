"""`treegen eval`: sample tasks with a model, score them, and leave run directories behind."""

import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.interrupts import Interrupted
from treegen.cli.judging import check_of_use, complaint, judge_rest, open_judging, take_execution
from treegen.cli.options import CONTEXT, FLAGS, QUIET, WRITE_OUT, asked_for, options_of, task_names
from treegen.cli.places import places_for, take_cluster
from treegen.cli.work import Stop, Work, fill, kept_of, look_at, open_runs, wanted
from treegen.common.formats import safe_text

if TYPE_CHECKING:
    from treegen.cluster.places import Places
    from treegen.evals.course.progress import Progress
    from treegen.evals.job import Job
    from treegen.evals.judged.execution import Judging
    from treegen.llm import LLM
    from treegen.runs import RunSettings

_UNIT: Final = "samples"


@dataclass(frozen=True, slots=True)
class _Work(Work):
    """One task and its open run. judging: of its programs, if they may run."""

    job: "Job"
    judging: "Judging | None"


@click.command("eval", context_settings=CONTEXT)
@options_of(
    "task", "data", "arguments", "model", "cluster", "sampling", "stopping", "report", "execution"
)
@click.option("--output-path", "-o", metavar="DIR", help="Run directory. Default: a new one in "
              "runs/.")  # fmt: skip
@click.option("--resume", is_flag=False, flag_value="", metavar="[DIR]", help="Continue the run "
              "in DIR with the settings it has; without DIR, begin or continue the one in "
              "--output-path.")  # fmt: skip
@click.option("--no-score", "--predict-only", "no_score", is_flag=True, help="Only sample; "
              "`treegen score` scores later.")  # fmt: skip
@click.option("--log-tokens", is_flag=True, help="Store token ids beside the texts.")
@WRITE_OUT
@QUIET
def command(
    output_path: str | None,
    resume: str | None,
    no_score: bool,
    write_out: bool,
    quiet: bool,
    **params: Any,
) -> None:
    """Sample every problem of each TASK, score the samples, and print the results.

    Everything is stored as it finishes. A run that was stopped, by a signal or by pulling the
    plug, continues with --resume and ends with the samples it would have had.
    """
    from treegen.cli.destinations import destinations
    from treegen.cli.discarding import discarding
    from treegen.cli.render import demo_notice
    from treegen.errors import RunError
    from treegen.evals.asked.given import check_read
    from treegen.evals.job import load_job
    from treegen.evals.judged.scoring import look_back
    from treegen.runs import RunDir
    from treegen.tasks import get_task

    tasks = task_names(params)
    cluster = take_cluster(params)
    execution = take_execution(params)
    given = asked_for(params) | ({"score": False} if no_score else {})
    places = places_for(cluster, given)
    targets = destinations(tasks, given, output_path, resume)
    check_read(given, [target.settings for target in targets])
    if not quiet:
        demo_notice(given, [each.settings.engine.model for each in targets if not each.resume])
    check_of_use([get_task(target.settings.task) for target in targets], execution)
    jobs = [load_job(target.settings) for target in targets]
    asked = [
        _checked(job, places, fresh=not target.resume, write_out=write_out, quiet=quiet)
        for job, target in zip(jobs, targets, strict=True)
    ]
    again = shlex.quote(resume or output_path or str(targets[0].path))
    allowed = " --allow-code-execution" if execution else ""
    advice = f"continue with: treegen eval --resume {again}{allowed}"
    with ExitStack() as stack:
        opened = zip(targets, asked, strict=True)
        runs = open_runs(RunDir, opened, stack, unit=_UNIT, quiet=quiet)
        for job, run in zip(jobs, runs, strict=True):
            look_back(job, run)
        work: list[_Work] = []
        # It is entered first, so it ends after the judges, which write in the run directories.
        stack.enter_context(discarding(runs, but=RunError))
        for job, run in zip(jobs, runs, strict=True):
            judging = open_judging(job, run, execution, quiet=quiet)
            if judging:
                stack.callback(judging.close)
            work.append(_Work(job, run, judging=judging))
        try:
            kept = partial(kept_of, work, _UNIT)
            fill(work, _steps, lambda: f"{kept()}; {advice}", places=places, quiet=quiet)
            for item in work:
                if item.judging:
                    judge_rest(item.job, item.run, item.judging, quiet=quiet)
            _report(work, quiet=quiet)
        except Interrupted as stopped:
            raise Interrupted(stopped.signum, f"{kept_of(work, _UNIT)}; {advice}") from None
    if missing := sum(max(item.run.missing, 0) for item in work):
        click.echo(f"Error: {missing:,} samples were not drawn; {advice}", err=True)
    unscored = [told for item in work if (told := complaint(item.job, item.run, item.judging))]
    for told in unscored:
        click.echo(safe_text(f"Error: {told}"), err=True)
    if missing or unscored:
        raise SystemExit(1)


def _checked(
    job: "Job", places: "Places | None", *, fresh: bool, write_out: bool, quiet: bool
) -> "RunSettings":
    """Check all that can be checked without weights; returns the settings of the run."""
    from treegen.cli.render import notice, show_prompt
    from treegen.evals.choices import by_likelihood
    from treegen.evals.job import first_prompt, plan_job
    from treegen.evals.recommended import advice

    facts = look_at(job, places, quiet=quiet)
    plan_job(job, facts)
    told = advice(job.settings.sampling, facts.spec)
    if told and fresh and not quiet and not by_likelihood(job.data):
        notice(told)
    if write_out:
        show_prompt(first_prompt(job, facts), quiet=quiet)
    return wanted(job, facts, FLAGS)


def _steps(item: _Work, llm: "LLM", stop: Stop) -> "Iterator[Progress]":
    from treegen.evals.run import sample

    return sample(item.job, item.run, llm, stop=stop, judging=item.judging)


def _report(work: list[_Work], *, quiet: bool) -> None:
    from treegen.cli.render import echo, json_line, notice, pictures
    from treegen.cli.tables import report_tables
    from treegen.evals.judged.results import write_results

    documents = []
    for item in work:
        results, report = write_results(item.job, item.run, item.judging)
        if results["shortened"] and not quiet:
            notice(
                f"{results['shortened']:,} prompts were too long for the model and have fewer "
                "solved examples; see dropped in samples.jsonl"
            )
        documents.append({"run": str(item.run.path), **_without_parts(results)})
        if not quiet:
            echo("")
            report_tables(results, report)
            pictures(report, item.run.path)
            echo(f"results: {item.run.path / 'results.json'}\n")
    json_line({"runs": documents})


def _without_parts(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name != "parts"}
