"""`treegen eval`: sample tasks with a model, score them, and leave run directories behind."""

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.interrupts import Interrupted, received
from treegen.cli.judging import check_of_use, complaint, judge_rest, open_judging, take_execution
from treegen.cli.options import CONTEXT, FLAGS, QUIET, WRITE_OUT, asked_for, options_of, task_names
from treegen.formats import safe_text

if TYPE_CHECKING:
    from treegen.evals.execution import Judging
    from treegen.evals.job import Job
    from treegen.llm import LLM
    from treegen.options import EngineOptions
    from treegen.runs import RunDir, RunSettings


@dataclass(frozen=True, slots=True)
class _Work:
    """One task and its open run; judging: of programs that may be run."""

    job: "Job"
    run: "RunDir"
    judging: "Judging | None"


Work = list[_Work]


@click.command("eval", context_settings=CONTEXT)
@options_of("task", "data", "arguments", "model", "sampling", "report", "execution")
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
    from treegen.evals.job import load_job
    from treegen.tasks import get_task

    tasks = task_names(params)
    execution = take_execution(params)
    given = asked_for(params) | ({"score": False} if no_score else {})
    targets = destinations(tasks, given, output_path, resume)
    if not quiet:
        demo_notice(given, [each.settings.engine.model for each in targets if not each.resume])
    check_of_use([get_task(target.settings.task) for target in targets], execution)
    jobs = [load_job(target.settings) for target in targets]
    asked = [_checked(job, write_out=write_out, quiet=quiet) for job in jobs]
    again = shlex.quote(resume or output_path or str(targets[0].path))
    allowed = " --allow-code-execution" if execution else ""
    advice = f"continue with: treegen eval --resume {again}{allowed}"
    with ExitStack() as stack:
        runs: list[RunDir] = []
        work: Work = []
        with discarding(runs):
            for target, wanted in zip(targets, asked, strict=True):
                run = _open(wanted, target.path, resume=target.resume, quiet=quiet)
                runs.append(stack.enter_context(run))
        # After the judges are closed, which write in the run directories.
        stack.enter_context(discarding(runs, but=RunError))
        for job, run in zip(jobs, runs, strict=True):
            judging = open_judging(job, run, execution, quiet=quiet)
            if judging:
                stack.callback(judging.close)
            work.append(_Work(job, run, judging=judging))
        try:
            _sample_all(work, advice, quiet=quiet)
            for item in work:
                if item.judging:
                    judge_rest(item.job, item.run, item.judging, quiet=quiet)
            _report(work, quiet=quiet)
        except Interrupted as stopped:
            raise Interrupted(stopped.signum, f"{_kept(work)}; {advice}") from None
    if missing := sum(max(item.run.missing, 0) for item in work):
        click.echo(f"Error: {missing:,} samples were not drawn; {advice}", err=True)
    unscored = [told for item in work if (told := complaint(item.job, item.run, item.judging))]
    for told in unscored:
        click.echo(safe_text(f"Error: {told}"), err=True)
    if missing or unscored:
        raise SystemExit(1)


def _checked(job: "Job", *, write_out: bool, quiet: bool) -> "RunSettings":
    """Check all that can be checked without weights; returns what the run is asked for."""
    from treegen.cli.render import show_prompt, skipped_rows
    from treegen.evals.job import (
        check_machine,
        first_prompt,
        look_at_model,
        plan_job,
        run_settings,
        weights_fingerprint,
    )

    if not quiet:
        skipped_rows(job.data.skipped)
    facts = look_at_model(job.settings.engine)
    check_machine(job.settings.engine)
    plan_job(job, facts)
    if write_out:
        show_prompt(first_prompt(job, facts), quiet=quiet)
    return run_settings(
        job,
        dtype=facts.dtype,
        fingerprint=weights_fingerprint(job.settings.engine),
        flags=FLAGS,
    )


def _open(asked: "RunSettings", path: Path, *, resume: bool, quiet: bool) -> "RunDir":
    """Begin or continue a run."""
    from treegen.cli.render import notice
    from treegen.runs import RunDir

    run = RunDir.resume(path, asked) if resume else RunDir.create(path, asked)
    for line in run.notices:
        notice(line)
    if not quiet:
        done = f", {len(run.done):,} of {run.info.planned:,} samples done" if resume else ""
        notice(f"run directory: {path}{done}")
    return run


def _sample_all(work: Work, advice: str, *, quiet: bool) -> None:
    """Draw what each run lacks; the model is loaded once if there is anything to draw."""
    from treegen.cli.discarding import all_new
    from treegen.cli.progress import draw
    from treegen.cli.render import notice
    from treegen.errors import RunError, TreegenError
    from treegen.evals.run import sample
    from treegen.runs import graceful_signals

    llm: LLM | None = None
    loaded: EngineOptions | None = None
    for item in work:
        job, run, engine = item.job, item.run, item.job.settings.engine
        if run.missing <= 0:
            continue
        if llm is None or loaded != engine:
            llm = None  # gives its memory back before the next one is loaded
            if not quiet:
                notice(f"loading {engine.model}")
            llm, loaded = _load(engine, run.info.identity["model"]["fingerprint"]), engine
        with graceful_signals() as graceful:
            stop = _either(received, graceful)
            try:
                steps = sample(job, run, llm, stop=stop, judging=item.judging)
                draw(steps, job.task.name, quiet=quiet)
            except RunError:
                raise  # says itself what is kept, and how to go on
            except TreegenError as error:
                if all_new([each.run for each in work]):
                    raise  # there is nothing to continue
                raise type(error)(f"{error}; {_kept(work)}; {advice}") from error
            if signum := stop():
                raise Interrupted(signum)


def _load(engine: "EngineOptions", fingerprint: str) -> "LLM":
    from transformers.utils import logging

    from treegen.evals.job import load_llm

    # transformers' bars and advice would stand between ours.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load_llm(engine, fingerprint)


def _report(work: Work, *, quiet: bool) -> None:
    from treegen.cli.render import echo, json_line, notice, pictures, report_tables
    from treegen.evals.run import write_results

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


def _kept(work: Work) -> str:
    done = sum(len(item.run.done) for item in work)
    planned = sum(item.run.info.planned for item in work)
    return f"{done:,} of {planned:,} samples are kept"


def _either(*flags: Callable[[], int | None]) -> Callable[[], int | None]:
    return lambda: next((signum for flag in flags if (signum := flag())), None)
