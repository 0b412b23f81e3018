"""Scoring of evaluations whose samples are programs, which have to be run."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from treegen.errors import InputError, Message, arg
from treegen.evals.pipeline.listener import Listener
from treegen.evals.scoring.code_execution import ExecutionOptions, ProgramScoring

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.evals.task import Task
    from treegen.runs import RunDir

_OPTIONS = ("sandbox", "num_workers")


def make_execution_options(
    allow_code_execution: bool,
    sandbox: str | None = None,
    num_workers: int | None = None,
    *,
    rescore: bool = False,
) -> ExecutionOptions | None:
    """Return the permission to run programs; None without it.

    Args:
        allow_code_execution: Whether the user allows programs that a model wrote to run.
        sandbox: The sandbox; None for "auto".
        num_workers: The number of programs that run at once; None for the default.
        rescore: Whether programs that have a verdict are run again.

    Raises:
        InputError: the sandbox is not known, or an option has no effect.
    """
    options = {"sandbox": sandbox, "num_workers": num_workers}
    chosen = {name: value for name, value in options.items() if value is not None}
    if not allow_code_execution:
        if chosen or rescore:
            name = next(iter(chosen), "rejudge")
            raise InputError(
                f"{arg(name + '=')} has no effect without {arg('allow_code_execution', True)}; "
                "pass both arguments"
            )
        return None
    return ExecutionOptions(rescore=rescore, sandbox=sandbox or "auto", num_workers=num_workers)


def check_execution_options(tasks: "Sequence[Task]", execution: ExecutionOptions | None) -> None:
    """Raise InputError for sandbox= or num_workers= if no task has programs to run.

    The permission alone is not an error: scripts give it for tasks of all kinds.
    """
    if execution is None or any(task.executes_code for task in tasks):
        return
    for name in _OPTIONS:
        if getattr(execution, name) != getattr(ExecutionOptions(), name):
            names = ", ".join(task.name for task in tasks)
            verb = "runs" if len(tasks) == 1 else "run"
            raise InputError(
                f"{arg(name + '=')} has no effect, because {names} {verb} no programs; remove "
                f"{arg(name + '=')}"
            )


def start_program_scoring(
    job: "Job",
    run: "RunDir",
    execution: ExecutionOptions | None,
    listener: Listener,
    stack: ExitStack,
) -> ProgramScoring | None:
    """Return started scoring of a run's programs; None if there are none or they may not run.

    Args:
        job: The job of the run.
        run: The run directory.
        execution: Permission to run programs; None without it.
        listener: Receives messages.
        stack: Closes the scoring.
    """
    if not job.task.executes_code or not job.settings.score:
        return None
    if execution is None:
        listener.warn(
            Message(
                f"scoring {job.task.name} runs programs that the model wrote, which needs "
                f"{arg('allow_code_execution', True)}; without it, treegen does not score samples"
            )
        )
        return None
    program_scoring = _open_program_scoring(job, run, execution, stack)
    for line in program_scoring.prepare():
        listener.tell(line)
    return program_scoring


def _open_program_scoring(
    job: "Job", run: "RunDir", execution: ExecutionOptions | None, stack: ExitStack
) -> ProgramScoring:
    program_scoring: ProgramScoring = job.task.open_scoring(run, execution)
    return stack.enter_context(closing(program_scoring))


def finish_program_scoring(
    job: "Job", run: "RunDir", program_scoring: ProgramScoring, listener: Listener
) -> None:
    """Score the programs that have no verdict yet.

    Args:
        job: The job of the run.
        run: The run directory.
        program_scoring: The started scoring.
        listener: Receives progress and can interrupt.
    """
    with listener.poll_interrupts() as stop:
        for record in run.records():
            program_scoring.add(record)
        listener.track(program_scoring.finish(stop), f"{job.task.name}, scoring")


def rescore_programs(
    job: "Job",
    run: "RunDir",
    execution: ExecutionOptions | None,
    listener: Listener,
    stack: ExitStack,
) -> ProgramScoring | None:
    """Score the programs of a stored run that have no verdict; None if its task has no programs.

    Args:
        job: The job of the run.
        run: The run directory.
        execution: Permission to run programs; None without it.
        listener: Receives messages and progress.
        stack: Closes the scoring.

    Raises:
        InputError: there are some, and they may not run.
    """
    if not job.task.executes_code:
        return None
    program_scoring = _open_program_scoring(job, run, execution, stack)
    for record in run.records():
        program_scoring.add(record)
    if program_scoring.missing and execution is None:
        raise InputError(
            f"{program_scoring.missing:,} samples of {job.task.name} are not scored yet, and "
            "scoring runs programs that the model wrote; allow it with "
            f"{arg('allow_code_execution', True)}"
        )
    if program_scoring.missing:
        for line in program_scoring.prepare():
            listener.tell(line)
        finish_program_scoring(job, run, program_scoring, listener)
    return program_scoring


def describe_unscored(
    job: "Job", run: "RunDir", program_scoring: ProgramScoring | None
) -> str | None:
    """Return a sentence on samples without a score; None if all have one.

    Args:
        job: The job of the run.
        run: The run directory.
        program_scoring: The scoring of programs; None if they may not run.
    """
    if not job.task.executes_code or not job.settings.score:
        return None
    again = f"treegen score {shlex.quote(str(run.path))} --allow-code-execution"
    again += " --allow-task-code" if job.settings.runs_code else ""
    if program_scoring is None:
        return f"the samples are not scored; score them with: {again}"
    if not program_scoring.missing:
        return None
    errors = program_scoring.summary()["errors"]
    reason = f" ({errors[0]['detail']})" if errors else ""
    num = program_scoring.missing
    return f"treegen could not score {num:,} samples{reason}; try again with: {again}"
