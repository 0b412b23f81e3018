"""Evaluations from what was asked for to their results: what `treegen eval` and `evaluate` do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import RunError
from treegen.evals.asked.given import check_read
from treegen.evals.job import Job, first_prompt, load_job, plan_job
from treegen.evals.judged.execution import Execution, Judging
from treegen.evals.judged.results import write_results
from treegen.evals.judged.scoring import look_back
from treegen.evals.registry import get_task
from treegen.evals.run import sample
from treegen.evals.running.destinations import destinations
from treegen.evals.running.discarding import discarding
from treegen.evals.running.judging import check_of_use, complaint, judge_rest, open_judging
from treegen.evals.running.listener import Listener, Stop
from treegen.evals.running.work import (
    Models,
    Work,
    fill,
    kept_of,
    open_runs,
    tell_demo,
    tell_skipped,
)
from treegen.evals.statistics.metrics import Report
from treegen.evals.task import Task
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.course.progress import Progress
    from treegen.llm.calls import Calls
    from treegen.runs import RunSettings

_UNIT: Final = "samples"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation came to.

    results: the content of results.json. report: its metrics; None if nothing is scored.
    missing: samples that were not drawn. complaint: what is not scored, and why; None if nothing.
    """

    path: Path
    results: Mapping[str, Any]
    report: Report | None
    missing: int
    complaint: str | None


@dataclass(frozen=True, slots=True)
class _Work(Work[Job, RunDir]):
    """One task and its open run. judging: of its programs, if they may run."""

    judging: Judging | None

    @property
    def title(self) -> str:
        return self.job.task.name

    def steps(self, llm: "Calls", stop: Stop) -> "Iterator[Progress]":
        return sample(self.job, self.run, llm, stop=stop, judging=self.judging)

    def finished(self) -> Evaluated:
        """Write the results."""
        results, report = write_results(self.job, self.run, self.judging)
        missing, unscored = max(self.run.missing, 0), complaint(self.job, self.run, self.judging)
        return Evaluated(self.run.path, results, report, missing, unscored)


def evaluate_all(
    tasks: Sequence[str | Task],
    asked: Mapping[str, Any],
    models: Models,
    listener: Listener,
    *,
    output: str | None = None,
    resume: str | None = None,
    execution: Execution | None = None,
    show_prompts: bool = False,
) -> list[Evaluated]:
    """Run evaluations of some tasks, one after another, each in a directory of its own.

    asked: the user's choices, by the names of settings.
    output: the directory, or that of all; None for a new one in runs/.
    resume: a run to continue, or a directory of several; "" continues what is in `output` and
    begins the rest.
    execution: permission to run programs that the model wrote.
    show_prompts: whether the listener gets the first prompt of each.

    If it is interrupted, a note of the exception says what is stored, and how to continue.
    """
    given = models.choices(dict(asked))
    targets = destinations(tasks, given, output, resume)
    check_read(asked, [target.settings for target in targets])
    tell_demo(given, [target.settings for target in targets if not target.resume], listener)
    check_of_use([get_task(target.settings.task) for target in targets], execution)
    jobs = [load_job(target.settings) for target in targets]
    wanted = [_checked(job, models, listener, show_prompts=show_prompts) for job in jobs]
    again = listener.again(resume or output or targets[0].path)
    with ExitStack() as stack:
        opened = zip(targets, wanted, strict=True)
        runs = open_runs(RunDir, opened, stack, listener, unit=_UNIT)
        for job, run in zip(jobs, runs, strict=True):
            look_back(job, run)
        work: list[_Work] = []
        stack.enter_context(models)
        # It is entered first, so it ends after the judges, which write in the run directories.
        stack.enter_context(discarding(runs, but=RunError))
        for job, run in zip(jobs, runs, strict=True):
            judging = open_judging(job, run, execution, listener)
            if judging:
                stack.callback(judging.close)
            work.append(_Work(job, run, judging=judging))

        def kept() -> str:
            return f"{kept_of(work, _UNIT)}; {again}"

        try:
            fill(work, models, listener, kept)
            for item in work:
                if item.judging:
                    judge_rest(item.job, item.run, item.judging, listener)
            return [item.finished() for item in work]
        except BaseException as stopped:
            if not isinstance(stopped, Exception):
                stopped.add_note(kept())
            raise


def _checked(job: Job, models: Models, listener: Listener, *, show_prompts: bool) -> "RunSettings":
    """Check all that can be checked without weights; returns the settings of the run."""
    tell_skipped(job, listener)
    facts = models.facts(job.settings.engine)
    plan_job(job, facts)
    if show_prompts:
        listener.show_prompt(first_prompt(job, facts))
    return models.settings(job, facts)
