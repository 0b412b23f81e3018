"""Evaluations from settings to results: what `treegen eval`, `treegen plan` and `evaluate` do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen import demo
from treegen.common.files import file_name
from treegen.common.signals import NOTHING_DRAWN, note_on_interrupt
from treegen.errors import InputError, Message, arg
from treegen.evals.config.base import check_no_unused, explain_moved_data
from treegen.evals.config.eval_settings import advice, resolve_eval_settings
from treegen.evals.job import Job, PreparedJob, first_prompt, fit_job, load_job, prepare_job
from treegen.evals.model import load_model_info
from treegen.evals.multiple_choice import is_multiple_choice
from treegen.evals.pipeline.execution import (
    ModelLoader,
    RunWork,
    announce_demo_model,
    execute_runs,
    prepare_runs,
    tell_skipped,
)
from treegen.evals.pipeline.listener import Listener, Stop
from treegen.evals.pipeline.program_scoring import (
    check_execution_options,
    describe_unscored,
    finish_program_scoring,
    start_program_scoring,
)
from treegen.evals.pipeline.targets import (
    RunTarget,
    destinations,
    is_run,
    named_path,
    new_path,
    tell_late_choices,
)
from treegen.evals.registry import get_task
from treegen.evals.sample_recorder import keep_job_images
from treegen.evals.sampling import sample
from treegen.evals.scoring.code_execution import ExecutionOptions, ProgramScoring
from treegen.evals.scoring.results import write_results
from treegen.evals.scoring.run_verdicts import RunVerdicts
from treegen.evals.scoring.samples import restore_rounds
from treegen.evals.statistics.metrics import Report
from treegen.evals.task import Task
from treegen.prompts.tree import prompts_of
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.config.eval_settings import EvalSettings
    from treegen.evals.pipeline.execution import Before
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.llm.base import BaseLLM
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation."""

    path: Path
    results: Mapping[str, Any]
    """The content of results.json."""
    report: Report | None
    """Its metrics; None if nothing is scored."""
    missing: int
    """The number of samples that were not drawn."""
    unscored: str | None
    """A sentence on samples without a score; None if all are scored."""
    resume_hint: str
    """How to resume the run, for messages."""
    judged_by: Mapping[str, Any] | None = None
    """As in `EvalSettings`."""
    verdicts: RunVerdicts | None = None
    """The verdicts on the samples; None if they are not scored, or are programs."""


@dataclass(frozen=True, slots=True)
class _Work(RunWork[Job, RunDir, EvaluationResult]):
    """A task and its open run."""

    prepared: PreparedJob | None
    """The job with the plan of its prompts; None for a complete run."""
    verdicts: RunVerdicts | None
    """As in `EvaluationResult`."""
    program_scoring: ProgramScoring | None
    """Scores its programs, if they may run."""

    @property
    def title(self) -> str:
        return self.job.task.name

    def steps(self, llm: "BaseLLM", stop: Stop) -> "Iterator[RunProgress]":
        prepared = self.prepared or prepare_job(self.job, llm.model_info)
        return sample(
            prepared,
            self.run,
            llm,
            stop=stop,
            program_scoring=self.program_scoring,
            verdicts=self.verdicts,
        )

    def end(self, listener: Listener) -> None:
        if self.program_scoring:
            finish_program_scoring(self.job, self.run, self.program_scoring, listener)

    def save_result(self, resume_hint: str) -> EvaluationResult:
        results, report = write_results(self.job, self.run, self.program_scoring, self.verdicts)
        return EvaluationResult(
            self.run.path,
            results,
            report,
            max(self.run.missing, 0),
            describe_unscored(self.job, self.run, self.program_scoring),
            resume_hint,
            self.job.settings.judged_by,
            self.verdicts,
        )


def _start_work(
    job: Job,
    run: RunDir,
    prepared: PreparedJob | None,
    execution: ExecutionOptions | None,
    listener: Listener,
    stack: ExitStack,
) -> _Work:
    """Return the work on an open run; the stack ends the scoring of its programs.

    Args:
        job: The task and its settings.
        run: The open run.
        prepared: The job with the plan of its prompts; None for a complete run.
        execution: Permission to run programs that the model wrote.
        listener: Receives messages.
        stack: Is closed when the work has ended.
    """
    is_scored_here = job.settings.score and not job.task.executes_code
    verdicts = RunVerdicts(job, cache_all=True) if is_scored_here else None
    restore_rounds(job, run, verdicts)
    if run.missing <= 0:
        keep_job_images(job, run)
    program_scoring = start_program_scoring(job, run, execution, listener, stack)
    return _Work(job, run, prepared, verdicts, program_scoring)


# A run of more samples is announced if the user chose neither problems nor their number.
_MIN_ANNOUNCED_SAMPLES: Final = 2000


def _tell_large_plans(jobs: Sequence[Job], listener: Listener) -> None:
    """Tell the listener which runs draw thousands of samples by default."""
    for job in jobs:
        if job.planned >= _MIN_ANNOUNCED_SAMPLES:
            listener.tell(
                Message(
                    f"{job.task.name}: the run draws {job.planned:,} samples, "
                    f"{job.settings.num_samples:,} for each of {len(job.data.problems):,} "
                    f"problems; {arg('limit=')} or {arg('num_samples=')} reduces them"
                )
            )


def _warn_of_equal_samples(jobs: Sequence[Job], listener: Listener) -> None:
    """Warn of runs that draw several samples of a problem by greedy decoding."""
    greedy = [job.settings for job in jobs if job.settings.sampling.temperature == 0]
    for num in dict.fromkeys(settings.num_samples for settings in greedy):
        if num > 1:
            listener.warn(
                Message(
                    f"Warning: the {num} samples of a problem are equal, because the temperature "
                    f"is 0; to draw different samples, pass {arg('temperature', 0.7)}"
                )
            )


def _tell_unused_template(
    job: Job, model_info: "ModelInfo", shown_hints: set[str], listener: Listener
) -> None:
    """Tell the listener once if the model has a chat template that the prompts do not use.

    Args:
        job: The job, with its prompts.
        model_info: The properties of the model.
        shown_hints: The hints that the listener got; a new one is added.
        listener: Receives the hint.
    """
    settings = job.settings
    if settings.apply_chat_template or str(settings.engine.model) in demo.MODELS:
        return
    if is_multiple_choice(job.data) or not getattr(model_info.tokenizer, "chat_template", None):
        return
    prompts = prompts_of(job.tree)
    if not prompts or any(node.has_messages for node in prompts[0].path):
        return
    hint = Message(
        "the model has a chat template, which this run does not use; for a chat model, pass "
        f"{arg('apply_chat_template', True)}"
    )
    if hint.marked not in shown_hints:
        shown_hints.add(hint.marked)
        listener.tell(hint)


def evaluate_all(
    tasks: Sequence[str | Task],
    choices: Mapping[str, Any],
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
        choices: The user's choices, by the names of settings.
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
    all_choices = models.choices(dict(choices))
    targets = destinations(tasks, all_choices, output, resume)
    check_no_unused(choices, [target.settings for target in targets])
    tell_late_choices(targets, choices, listener)
    new_settings = [target.settings for target in targets if not target.resume]
    announce_demo_model(all_choices, new_settings, listener)
    check_execution_options([get_task(target.settings.task) for target in targets], execution)
    if check_judges is not None and "judged_by" not in choices:
        for judged_by in (target.settings.judged_by for target in targets):
            if judged_by is not None:
                check_judges(judged_by)
    jobs = [_load_job(target, keeps_data=choices.get("data") is None) for target in targets]
    fresh = [job for job, target in zip(jobs, targets, strict=True) if not target.resume]
    if not choices.keys() & {"limit", "ids", "num_samples"}:
        _tell_large_plans(fresh, listener)
    _warn_of_equal_samples(fresh, listener)
    complete_runs = [
        (job, to.info) for job, to in zip(jobs, targets, strict=True) if to.is_complete
    ]
    hinted: set[str] = set()

    def prepare(job: Job, model_info: "ModelInfo") -> PreparedJob | None:
        is_whole = any(job is other for other, _ in complete_runs)
        prepared = None if is_whole else prepare_job(job, model_info)
        hint = advice(job.settings.sampling, model_info.spec)
        if hint and not is_multiple_choice(job.data) and any(job is other for other in fresh):
            listener.tell(hint)
        if prepared and any(job is other for other in fresh):
            _tell_unused_template(prepared.job, model_info, hinted, listener)
        if show_prompts:
            fitted = prepared.job if prepared else fit_job(job, model_info).job
            listener.show_prompt(first_prompt(fitted, model_info))
        return prepared

    def work(runs: Sequence[RunDir], stack: ExitStack) -> "tuple[list[_Work], Before]":
        opened = zip(jobs, runs, prepared, strict=True)
        return [_start_work(*of_task, execution, listener, stack) for of_task in opened], ()

    models.threads = next((target.threads for target in targets if target.threads), None)
    # Showing a prompt needs the tokenizer.
    complete = () if show_prompts else complete_runs
    with note_on_interrupt(NOTHING_DRAWN):
        run_settings, prepared = prepare_runs(jobs, models, listener, prepare, targets, complete)
    settings = [target.settings for target in targets]
    resume_hint = listener.resume_command(resume or output or targets[0].path, settings)
    return execute_runs(
        RunDir, targets, run_settings, work, models, listener, resume_hint, unit="samples"
    )


def _load_job(target: "RunTarget[EvalSettings]", keeps_data: bool) -> Job:
    """Load the job of a run.

    Args:
        target: The run.
        keeps_data: Whether a resumed run reads the data at the stored path.
    """
    data = target.settings.options.data if target.resume and keeps_data else None
    with explain_moved_data(data), note_on_interrupt(NOTHING_DRAWN):
        return load_job(target.settings)


def plan_tasks(
    tasks: Sequence[str],
    choices: Mapping[str, Any],
    listener: Listener,
    *,
    show_prompts: bool = False,
) -> Iterator[PreparedJob]:
    """Yield the prepared job of each task's run.

    Args:
        tasks: Names of tasks.
        choices: The user's choices, by the names of settings.
        listener: Receives notices.
        show_prompts: Whether the listener also gets the first prompt of each task.

    Raises:
        InputError: There is no task, or a choice cannot be used.
        TreegenError: The data, the model's configuration or the plan is in error.
    """
    if not tasks:
        raise InputError("no task is given; use `treegen tasks` to list the tasks")
    jobs = [
        load_job(resolve_eval_settings(demo.fill_defaults({**choices, "task": task})))
        for task in tasks
    ]
    check_no_unused(choices, [job.settings for job in jobs])
    announce_demo_model(choices, [job.settings for job in jobs], listener)
    for job in jobs:
        tell_skipped(job, listener)
        model_info = load_model_info(job.settings.engine)
        prepared = prepare_job(job, model_info)
        if show_prompts:
            listener.show_prompt(first_prompt(prepared.job, model_info))
        yield prepared


def evaluate_adapters(
    adapters: Sequence[str],
    tasks: Sequence[str | Task],
    choices: Mapping[str, Any],
    models: ModelLoader,
    listener: Listener,
    *,
    output: str | None = None,
    resume: str | None = None,
    **how: Any,
) -> list[list[EvaluationResult]]:
    """Run evaluations with each adapter in a folder of its name; the weights are read once.

    Args:
        adapters: Directories of adapters.
        tasks: Tasks or their names.
        choices: As for `evaluate_all`, without an adapter.
        models: Loads the models.
        listener: Receives messages and progress.
        output: The parent directory; None for a new one in runs/.
        resume: A parent directory whose runs are resumed, and started where there are none; ""
            means `output`.
        how: Further arguments of `evaluate_all`.

    Raises:
        InputError: two adapters have the same name, or a directory is taken.
        ModelError: an adapter cannot be used. Nothing is drawn then.
    """
    from treegen.model.checkpoint.adapter import find_adapter
    from treegen.model.weights import share_base_weights

    if models.llm is not None or models.on_workers:
        raise InputError(
            "several adapters cannot be used together with workers or with a loaded model; run "
            "the adapters separately"
        )
    if "adapter" in choices:
        raise InputError(
            "--adapter cannot be used together with an adapter in --model-args; remove the "
            "adapter from --model-args"
        )
    model = Path(str(choices.get("model", demo.NAME))).name
    directory = named_path(output, resume) or new_path("adapters", model)
    folders = [file_name(Path(adapter).name) for adapter in adapters]
    if len({*folders}) < len(folders):
        raise InputError(
            f"two adapters have the same name: {', '.join(folders)}; rename a directory, or run "
            "the adapters separately"
        )
    if is_run(directory):
        raise InputError(
            f"{directory} is a single run; give the directory that contains "
            "the runs of the adapters"
        )
    for adapter, folder in zip(adapters, folders, strict=True):
        find_adapter(adapter)
        if resume is None and (directory / folder).exists():
            raise InputError(
                f"{directory / folder} already exists; continue with --resume {directory}"
            )
    results = []
    with share_base_weights():
        for adapter, folder in zip(adapters, folders, strict=True):
            all_choices = {**choices, "adapter": adapter}
            path, resume_runs = str(directory / folder), None if resume is None else ""
            results.append(
                evaluate_all(
                    tasks, all_choices, models, listener, output=path, resume=resume_runs, **how
                )
            )
    return results
