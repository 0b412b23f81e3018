"""Evaluations from settings to results: the work of `treegen eval` and `evaluate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.evals.config.base import check_no_unused
from treegen.evals.job import Job, first_prompt, load_job, plan_job
from treegen.evals.multiple_choice import is_multiple_choice
from treegen.evals.pipeline.execution import (
    ModelLoader,
    RunWork,
    announce_demo_model,
    execute_runs,
    prepare_runs,
)
from treegen.evals.pipeline.listener import Listener, Stop
from treegen.evals.pipeline.program_scoring import (
    check_execution_options,
    describe_unscored,
    finish_program_scoring,
    start_program_scoring,
)
from treegen.evals.pipeline.targets import destinations
from treegen.evals.progress.images import keep_job_images
from treegen.evals.recommended_sampling import advice
from treegen.evals.registry import get_task
from treegen.evals.sampling import sample
from treegen.evals.scoring.code_execution import ExecutionOptions, ProgramScoring
from treegen.evals.scoring.results import write_results
from treegen.evals.scoring.samples import restore_rounds
from treegen.evals.statistics.metrics import Report
from treegen.evals.task import Task
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.pipeline.execution import Before
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.llm.base import BaseLLM
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation.

    results: the content of results.json. report: its metrics; None if nothing is scored.
    missing: the number of samples that were not drawn. complaint: a sentence on samples without a
    score; None if all are scored. again: how to continue. judged_by: as in `EvalSettings`.
    """

    path: Path
    results: Mapping[str, Any]
    report: Report | None
    missing: int
    complaint: str | None
    again: str
    judged_by: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Work(RunWork[Job, RunDir, EvaluationResult]):
    """A task and its open run. judging: scores its programs, if they may run."""

    judging: ProgramScoring | None

    @property
    def title(self) -> str:
        return self.job.task.name

    def steps(self, llm: "BaseLLM", stop: Stop) -> "Iterator[RunProgress]":
        return sample(self.job, self.run, llm, stop=stop, judging=self.judging)

    def end(self, listener: Listener) -> None:
        if self.judging:
            finish_program_scoring(self.job, self.run, self.judging, listener)

    def save_result(self, again: str) -> EvaluationResult:
        results, report = write_results(self.job, self.run, self.judging)
        missing, unscored = (
            max(self.run.missing, 0),
            describe_unscored(self.job, self.run, self.judging),
        )
        judged_by = self.job.settings.judged_by
        return EvaluationResult(self.run.path, results, report, missing, unscored, again, judged_by)


# A run of more samples is announced if the user chose neither problems nor their number.
_MANY: Final = 2000


def _tell_large_plans(jobs: Sequence[Job], listener: Listener) -> None:
    """Tell the listener which runs draw thousands of samples by default."""
    for job in jobs:
        if job.planned >= _MANY:
            listener.tell(
                f"{job.task.name}: {job.planned:,} samples are planned, "
                f"{job.settings.num_samples:,} of each of {len(job.data.problems):,} problems; "
                "limit= or num_samples= takes fewer"
            )


def evaluate_all(
    tasks: Sequence[str | Task],
    asked: Mapping[str, Any],
    models: ModelLoader,
    listener: Listener,
    *,
    output: str | None = None,
    resume: str | None = None,
    execution: ExecutionOptions | None = None,
    show_prompts: bool = False,
    check_judges: Callable[[Mapping[str, Any]], object] | None = None,
) -> list[EvaluationResult]:
    """Run evaluations of some tasks, one after another, each in its own directory.

    If an evaluation is interrupted, a note of the exception says what is stored, and how to
    continue.

    Args:
        tasks: Tasks or their names.
        asked: The user's choices, by the names of settings.
        models: Loads the models, or holds one that is loaded.
        listener: Receives messages and progress.
        output: The run's directory, or the parent of several; None for a new one in runs/.
        resume: A run to resume, or a directory of several; "" resumes the runs in `output` and
            starts the rest.
        execution: Permission to run programs that the model wrote.
        show_prompts: Whether the listener gets the first prompt of each task.
        check_judges: Called with the judges that a resumed run names, before anything is drawn; it
            raises an error if they cannot judge.

    Returns:
        The result of each evaluation.
    """
    choices = models.choices(dict(asked))
    targets = destinations(tasks, choices, output, resume)
    check_no_unused(asked, [target.settings for target in targets])
    announce_demo_model(
        choices, [target.settings for target in targets if not target.resume], listener
    )
    check_execution_options([get_task(target.settings.task) for target in targets], execution)
    if check_judges is not None and "judged_by" not in asked:
        for target in targets:
            if target.settings.judged_by is not None:
                check_judges(target.settings.judged_by)
    jobs = [load_job(target.settings) for target in targets]

    fresh = [job for job, target in zip(jobs, targets, strict=True) if not target.resume]
    if not asked.keys() & {"limit", "ids", "num_samples"}:
        _tell_large_plans(fresh, listener)
    whole = [(job, to.info) for job, to in zip(jobs, targets, strict=True) if to.whole]

    def check(job: Job, facts: "ModelInfo") -> None:
        if not any(job is other for other, _ in whole):
            plan_job(job, facts)
        hint = advice(job.settings.sampling, facts.spec)
        if hint and not is_multiple_choice(job.data) and any(job is other for other in fresh):
            listener.tell(hint)
        if show_prompts:
            listener.show_prompt(first_prompt(job, facts))

    def work(runs: Sequence[RunDir], stack: ExitStack) -> "tuple[list[_Work], Before]":
        items = []
        for job, run in zip(jobs, runs, strict=True):
            restore_rounds(job, run)
            if run.missing <= 0:
                keep_job_images(job, run)
            judging = start_program_scoring(job, run, execution, listener)
            if judging:
                stack.callback(judging.close)
            items.append(_Work(job, run, judging=judging))
        return items, ()

    models.threads = next((target.threads for target in targets if target.threads), None)
    # Showing a prompt needs the tokenizer.
    wanted = prepare_runs(jobs, models, listener, check, () if show_prompts else whole)
    settings = [target.settings for target in targets]
    again = listener.resume_command(resume or output or targets[0].path, settings)
    return execute_runs(RunDir, targets, wanted, work, models, listener, again, unit="samples")
