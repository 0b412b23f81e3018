"""How `eval` and `score` treat tasks whose samples are programs, which have to be run."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treegen.cli.interrupts import Interrupted, received
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.evals.judged.execution import Execution, Judging
    from treegen.runs import RunDir
    from treegen.tasks import Task


def take_execution(params: dict[str, Any], *, anew: bool = False) -> "Execution | None":
    """Take the permission to run programs out of a command's parameters; None without it."""
    allowed = params.pop("allow_code_execution")
    options = {name: params.pop(name) for name in ("sandbox", "num_workers")}
    given = {name: value for name, value in options.items() if value is not None}
    if not allowed:
        if given or anew:
            name = next(iter(given), "rejudge").replace("_", "-")
            raise InputError(f"--{name} is of no use without --allow-code-execution")
        return None
    from treegen.evals.judged.execution import Execution
    from treegen.tasks.judge.sandbox import TIERS

    sandbox = given.get("sandbox", "auto")
    if sandbox != "auto" and sandbox not in TIERS:
        known = ", ".join(("auto", *TIERS))
        raise InputError(f"--sandbox must be one of {known}, got {sandbox!r}")
    return Execution(**given, anew=anew)


def check_of_use(tasks: "Sequence[Task]", execution: "Execution | None") -> None:
    """Raise InputError for --sandbox or --num-workers if no task has programs to run.

    The permission alone is no mistake: scripts give it for tasks of all kinds.
    """
    from treegen.evals.judged.execution import Execution, executing

    if execution is None or any(executing(task) for task in tasks):
        return
    for name in ("sandbox", "num_workers"):
        if getattr(execution, name) != getattr(Execution(), name):
            told = ", ".join(task.name for task in tasks)
            verb = "runs" if len(tasks) == 1 else "run"
            raise InputError(
                f"--{name.replace('_', '-')} is of no use: {told} {verb} no programs; leave it out"
            )


def open_judging(
    job: "Job", run: "RunDir", execution: "Execution | None", *, quiet: bool
) -> "Judging | None":
    """Return a started judge for a run's programs; None if there are none or they may not run."""
    from treegen.cli.render import notice
    from treegen.evals.judged.execution import executing

    task = executing(job.task)
    if task is None or not job.settings.score:
        return None
    if execution is None:
        notice(
            f"{job.task.name} is scored by running what the model wrote, which needs "
            "--allow-code-execution; without it, samples are drawn and not scored"
        )
        return None
    judging = task.judging(run, execution)
    try:
        lines = judging.prepare()
    except BaseException:
        judging.close()
        raise
    for line in lines if not quiet else ():
        notice(line)
    return judging


def judge_rest(job: "Job", run: "RunDir", judging: "Judging", *, quiet: bool) -> None:
    """Judge what is not judged yet, drawing how far it is; Interrupted if a signal came."""
    from treegen.cli.progress import show_progress
    from treegen.runs import graceful_signals

    with graceful_signals() as graceful:

        def stop() -> int | None:
            return received() or graceful()

        for record in run.records():
            judging.add(record)
        show_progress(judging.rest(stop), f"{job.task.name}, judging", quiet=quiet)
        if signum := stop():
            raise Interrupted(signum)


def complaint(job: "Job", run: "RunDir", judging: "Judging | None") -> str | None:
    """Return a sentence on samples without a score; None if all have one."""
    from treegen.evals.judged.execution import executing

    if executing(job.task) is None or not job.settings.score:
        return None
    again = f"treegen score {shlex.quote(str(run.path))} --allow-code-execution"
    if judging is None:
        return f"the samples are not scored; score them with: {again}"
    if not judging.missing:
        return None
    told = judging.summary()["errors"]
    reason = f" ({told[0]['detail']})" if told else ""
    return f"{judging.missing:,} samples could not be judged{reason}; try again with: {again}"
