"""Evaluations from what was asked for to their results: what `treegen eval` and `evaluate` do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.evals.asked.given import check_read
from treegen.evals.choices import by_likelihood
from treegen.evals.course.images import keep_job_images
from treegen.evals.job import Job, first_prompt, load_job, plan_job
from treegen.evals.judged.execution import Execution, Judging
from treegen.evals.judged.results import write_results
from treegen.evals.judged.scoring import look_back
from treegen.evals.recommended import advice
from treegen.evals.registry import get_task
from treegen.evals.run import sample
from treegen.evals.running.destinations import destinations
from treegen.evals.running.judging import check_of_use, complaint, judge_rest, open_judging
from treegen.evals.running.listener import Listener, Stop
from treegen.evals.running.work import Models, Work, carry_out, prepared, tell_demo
from treegen.evals.statistics.metrics import Report
from treegen.evals.task import Task
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.course.progress import RunProgress
    from treegen.evals.running.work import Before
    from treegen.llm.calls import Calls
    from treegen.model.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation came to.

    results: the content of results.json. report: its metrics; None if nothing is scored.
    missing: samples that were not drawn. complaint: what is not scored, and why; None if
    nothing. again: how to continue. judged_by: as in `EvalSettings`.
    """

    path: Path
    results: Mapping[str, Any]
    report: Report | None
    missing: int
    complaint: str | None
    again: str
    judged_by: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Work(Work[Job, RunDir, Evaluated]):
    """One task and its open run. judging: of its programs, if they may run."""

    judging: Judging | None

    @property
    def title(self) -> str:
        return self.job.task.name

    def steps(self, llm: "Calls", stop: Stop) -> "Iterator[RunProgress]":
        return sample(self.job, self.run, llm, stop=stop, judging=self.judging)

    def end(self, listener: Listener) -> None:
        if self.judging:
            judge_rest(self.job, self.run, self.judging, listener)

    def finished(self, again: str) -> Evaluated:
        results, report = write_results(self.job, self.run, self.judging)
        missing, unscored = max(self.run.missing, 0), complaint(self.job, self.run, self.judging)
        judged_by = self.job.settings.judged_by
        return Evaluated(self.run.path, results, report, missing, unscored, again, judged_by)


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
    check_judges: Callable[[Mapping[str, Any]], object] | None = None,
) -> list[Evaluated]:
    """Run evaluations of some tasks, one after another, each in a directory of its own.

    asked: the user's choices, by the names of settings.
    output: the directory, or that of all; None for a new one in runs/.
    resume: a run to continue, or a directory of several; "" continues what is in `output` and
    begins the rest.
    execution: permission to run programs that the model wrote.
    show_prompts: whether the listener gets the first prompt of each.
    check_judges: is called with the judges that a resumed run names, before anything is drawn; it
    raises if they cannot judge.

    If it is interrupted, a note of the exception says what is stored, and how to continue.
    """
    given = models.choices(dict(asked))
    targets = destinations(tasks, given, output, resume)
    check_read(asked, [target.settings for target in targets])
    tell_demo(given, [target.settings for target in targets if not target.resume], listener)
    check_of_use([get_task(target.settings.task) for target in targets], execution)
    if check_judges is not None and "judged_by" not in asked:
        for target in targets:
            if target.settings.judged_by is not None:
                check_judges(target.settings.judged_by)
    jobs = [load_job(target.settings) for target in targets]

    fresh = [job for job, target in zip(jobs, targets, strict=True) if not target.resume]
    whole = [(job, to.info) for job, to in zip(jobs, targets, strict=True) if to.whole]

    def check(job: Job, facts: "ModelFacts") -> None:
        if not any(job is each for each, _ in whole):
            plan_job(job, facts)
        told = advice(job.settings.sampling, facts.spec)
        if told and not by_likelihood(job.data) and any(job is each for each in fresh):
            listener.tell(told)
        if show_prompts:
            listener.show_prompt(first_prompt(job, facts))

    def work(runs: Sequence[RunDir], stack: ExitStack) -> "tuple[list[_Work], Before]":
        found = []
        for job, run in zip(jobs, runs, strict=True):
            look_back(job, run)
            if run.missing <= 0:
                keep_job_images(job, run)
            judging = open_judging(job, run, execution, listener)
            if judging:
                stack.callback(judging.close)
            found.append(_Work(job, run, judging=judging))
        return found, ()

    # To show a prompt takes the tokenizer.
    wanted = prepared(jobs, models, listener, check, () if show_prompts else whole)
    settings = [target.settings for target in targets]
    again = listener.again(resume or output or targets[0].path, settings)
    return carry_out(RunDir, targets, wanted, work, models, listener, again, unit="samples")
