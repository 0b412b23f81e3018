"""Evaluations and searches from Python: `evaluate`, `search_task`, and the `Run` they return."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from treegen.api.judge_plan import JudgingPlan
from treegen.common.files import as_path, file_name
from treegen.common.formatting import safe_text
from treegen.errors import InputError, arg
from treegen.evals.config.base import ALLOW_TASK_CODE, OpenRunOptions
from treegen.evals.judging.pipeline import JudgeLoader
from treegen.evals.pipeline.evaluation import evaluate_all
from treegen.evals.pipeline.execution import ModelLoader
from treegen.evals.pipeline.listener import BarListener, Listener
from treegen.evals.pipeline.program_scoring import make_execution_options
from treegen.evals.pipeline.search import search_all
from treegen.evals.registry import LM_EVAL, code_of, get_task, get_task_name
from treegen.evals.task import Task
from treegen.report.audit.audit import audit_quickly, audit_view
from treegen.report.audit.findings import Audit
from treegen.report.compare import Comparison, compare_runs
from treegen.report.frames import Frames
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.report.run_settings import describe_view, short_model_name
from treegen.report.tables import headline_of, headline_text, metrics, other_tables, sharing
from treegen.report.text import run_text

if TYPE_CHECKING:
    from treegen.evals.scoring.run_verdicts import RunVerdicts
    from treegen.llm.base import BaseLLM
    from treegen.report.tables import PrintableTable


TaskLike = str | Task | type
"""A task by name or place, as an object, or its class."""


class Run(Frames):
    """The current state of a run in its directory: its metrics, its samples, and comparisons.

    In a notebook it shows its metrics as a table. `metrics`, `samples`, `problems`, `nodes` and
    `progress` return pandas frames.

    Attributes:
        path: Its directory.
        view: The loaded run; see `treegen.report.view.RunView`.
    """

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return self.view.path

    @property
    def results(self) -> Any:
        """The content of results.json: metrics, cost, settings; None if there is none."""
        with self.view.open() as run:
            return run.results()

    @property
    def accuracy(self) -> float | None:
        """The first metric of the run's report; None if nothing is scored."""
        row = headline_of(self.view)
        return None if row is None else row.value

    def tables(self) -> "list[PrintableTable]":
        """Return the tables of the run; each prints as Markdown, and a notebook shows it."""
        further = metrics(self.view, first=False)
        return [
            metrics(self.view, first=True),
            *([further] if further.rows else []),
            *other_tables(self.view),
            *([shared] if (shared := sharing(self.view)) is not None else []),
        ]

    def report(self, path: str | Path | None = None, *, plots: bool = False) -> Path:
        """Write an HTML page that shows the run, and return its path.

        Args:
            path: The path of the page; by default report.html in the run's directory.
            plots: Whether to write plots next to the page.

        Raises:
            InputError: the page cannot be written.
        """
        page = self.path / "report.html" if path is None else as_path("path", path)
        return write_page([self.view], page, plots=plots, audits=[audit_quickly(self.view)])[0]

    def audit(self, *, quick: bool = False) -> Audit:
        """Return what may make the score misleading; see `treegen.report.audit.audit.audit_run`.

        Args:
            quick: Whether to leave out what may take minutes or calls the task's scorer: formulas,
                programs, and references.

        Raises:
            TreegenError: the audit fails.
        """
        return audit_view(self.view, quick=quick)

    def compare(self, other: "Run | str | Path", *, partial: bool = False) -> Comparison:
        """Return how the other run differs from this one, on the same problems.

        Args:
            other: The other run, or its directory.
            partial: Leave out problems that a run has not finished.

        Raises:
            InputError: the runs have different problems, or are not scored or not finished.
        """
        other_run = other if isinstance(other, Frames) else open_run(other)
        return compare_runs(self.view, other_run.view, partial=partial)

    def __str__(self) -> str:
        view = self.view
        text = run_text(view.results, view.report, unit=view.unit, more="tables() has them")
        return f"{describe_view(view)}\n\n{text}"

    def __repr__(self) -> str:
        view = self.view
        done = f"{view.num_done:,} of {view.info.planned:,} {view.unit}"
        headline = headline_text(view.report)
        return f"Run({str(view.path)!r}): {describe_view(view, short=True)}, {done}, {headline}"

    def _repr_html_(self) -> str:
        tables = "".join(table._repr_html_() for table in self.tables())
        notices = "".join(f"<p>{escape(notice)}</p>" for notice in self.view.notices)
        return f"<p>{escape(repr(self))}</p>{tables}{notices}"


def open_run(
    path: str | Path,
    *,
    data: str | None = None,
    task: TaskLike | None = None,
    allow_task_code: bool = False,
) -> Run:
    """Read the run in a directory, even while it is in progress; no lock is taken.

    Args:
        path: The directory of the run.
        data: Where the problems are now, if they are neither at their stored path nor in the run's
            own directory.
        task: A task that does not come with treegen, by path/to/file.py:Class or as an object. A
            run that names such a task does not run its code, so its samples are not scored unless
            it is given.
        allow_task_code: Whether to run the code that the run names.

    Raises:
        RunError: there is no run, or it is corrupt.
        InputError: `data` or `task` are not those of the run.
    """
    options: OpenRunOptions = {
        "data": data,
        "task": _instantiate_task(task),
        "allow_task_code": allow_task_code,
    }
    return Run(load_run(as_path("path", path), **options))


def evaluate(  # noqa: PLR0913 -- users name these settings of a run
    task: TaskLike | None = None,
    model: "str | Path | BaseLLM | None" = None,
    *,
    output: str | Path | None = None,
    resume: bool | str | Path = False,
    progress: bool = True,
    task_args: Mapping[str, object] | None = None,
    include_path: str | Path | None = None,
    allow_code_execution: bool = False,
    sandbox: str | None = None,
    num_workers: int | None = None,
    judge: "str | BaseLLM | Sequence[str | BaseLLM] | None" = None,
    rubric: str | Path | Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Sample the problems of a task, score the samples, and return the run, as `treegen eval` does.

    Every sample is stored as it ends. If the call is interrupted or fails, the run stays, and the
    error says how to continue it.

    Args:
        task: A name, path/to/file.py:Class, `lm-eval:TASK`, path/to/task.yaml in lm-eval's format,
            or a custom task, as an object or a class.
        model: A directory, a hub name, "demo", an LLM or a Cluster. Without it, tasks that the demo
            model knows use the demo model.
        output: The directory of the run. Default: a temporary directory, which is removed with the
            object that is returned.
        resume: True resumes the run in `output` if there is one; a directory resumes the run
            there, with its stored settings and those given here.
        progress: Whether to draw a bar, and print notices to stderr.
        task_args: Arguments that only this task has, by name.
        include_path: The folder of YAML files that contains the task, for a task that is named
            `lm-eval:TASK`.
        allow_code_execution: Run programs that the model wrote, if scoring needs that.
        sandbox: The sandbox of these programs; see `treegen eval --help`.
        num_workers: The number of these programs that run at once; see `treegen eval --help`.
        judge: A model, or several, that judge the samples by a rubric; see `treegen.judge`. A model
            that was loaded for the samples also judges if it is named, and is otherwise unloaded
            first. The run stores judge and rubric, so a call that resumes it judges too;
            judge="none" removes them.
        rubric: The rubric of the judges, as for `treegen.judge`.
        settings: Settings by their names in run.json: num_samples, temperature, max_tokens, seed,
            limit, data, num_fewshot, apply_chat_template and so on; docs/notebooks.md lists them.

    Raises:
        InputError: an argument cannot be used, or is not known.
        TreegenError: as for the LLM, the data and the run directory.
    """
    if include_path is not None:
        if not isinstance(task, str) or not task.startswith(LM_EVAL):
            raise InputError(
                f"{arg('include_path=')} is supported only for a task named lm-eval:TASK; "
                "remove the argument"
            )
        task = f"{task}@{include_path}"
    instance = _instantiate_task(task)
    choices, models = _choices(model, settings, task_args)
    execution = make_execution_options(allow_code_execution, sandbox, num_workers)
    plan = _plan_judging(judge, rubric)
    if judge is not None:
        choices["judged_by"] = None if plan is None else plan.to_json()
    models.keep_loaded = True
    name = _run_name(instance, choices, models)
    with _OutputDirectory(output, resume, choices, name) as place, closing(models):
        results = evaluate_all(
            [] if instance is None else [instance],
            choices,
            models,
            BarListener() if progress else Listener(),
            output=place.output,
            resume=place.resume,
            execution=execution,
            check_judges=lambda stored: JudgingPlan.check_stored(stored, {}),
        )
        if plan is None and results[0].judged_by is not None:
            plan = JudgingPlan.of_json(results[0].judged_by, {})
        if plan is not None:
            with JudgeLoader(models) as judges:
                plan.judge(
                    results[0].path,
                    progress=progress,
                    models=judges,
                    task=instance,
                    allow_task_code=True,
                )
    return _warn_of_findings(place.run(results[0].path, instance, results[0].verdicts), progress)


def _plan_judging(
    judge: "str | BaseLLM | Sequence[str | BaseLLM] | None",
    rubric: str | Path | Mapping[str, Any] | None,
) -> JudgingPlan | None:
    """Return the checked plan of judging, so that errors are raised before anything is sampled."""
    if judge is None and rubric is not None:
        raise InputError(
            f"{arg('rubric=')} has no effect without {arg('judge=')}; give {arg('judge=')} too"
        )
    plan = None if judge is None else JudgingPlan.make(judge, rubric=rubric)
    if plan is not None:
        plan.check()
    return plan


def _warn_of_findings(run: Run, is_shown: bool) -> Run:
    """Print one line if findings on a run are high, or if its audit fails; return the run."""
    if is_shown and (warning := audit_quickly(run.view).warning) is not None:
        BarListener().warn(safe_text(warning))
    return run


def search_task(
    task: TaskLike | None = None,
    model: "str | Path | BaseLLM | None" = None,
    *,
    method: str | None = None,
    output: str | Path | None = None,
    resume: bool | str | Path = False,
    progress: bool = True,
    task_args: Mapping[str, object] | None = None,
    allow_code_execution: bool = False,
    sandbox: str | None = None,
    num_workers: int | None = None,
    **settings: Any,
) -> Run:
    """Search for solutions of a task's problems, and return the run, as `treegen search` does.

    Args:
        task: As for `evaluate`, but a task with steps.
        model: As for `evaluate`.
        method: A name such as "beam" or "tot-dfs", or path/to/file.py:function for a function of
            your own; by default the task's.
        output: As for `evaluate`.
        resume: As for `evaluate`.
        progress: Whether to draw a bar, and print notices to stderr.
        task_args: Arguments that only this task has, by name.
        allow_code_execution: Run programs that the model wrote, if the task's environment does.
        sandbox: As for `evaluate`.
        num_workers: As for `evaluate`.
        settings: Settings by their names in run.json: budget (such as `{"tokens": 2000}`), width,
            depth, expand, evaluate, verifier, arguments (of the method), temperature, seed, limit
            and so on.

    Raises:
        InputError: an argument cannot be used, or is not known.
        TreegenError: as for the LLM, the data and the run directory.
    """
    if callable(method):
        name = getattr(method, "__name__", "function")
        raise InputError(
            f"{arg('method')} must be text, got {method!r:.60}; save the function in a file and "
            f"pass {arg('method=')}'path/to/file.py:{name}'. The file is run to load the function, "
            "so call search_task in another file"
        )
    instance = _instantiate_task(task)
    choices, models = _choices(model, settings, task_args)
    if instance is not None:
        choices["task"] = instance
    name = _run_name(instance, choices, models)
    with _OutputDirectory(output, resume, choices, name) as place:
        results = search_all(
            [] if method is None else [method],
            choices,
            models,
            BarListener() if progress else Listener(),
            output=place.output,
            resume=place.resume,
            execution=make_execution_options(allow_code_execution, sandbox, num_workers),
        )
    return place.run(results[0].path, instance)


@overload
def _instantiate_task(task: None) -> None: ...
@overload
def _instantiate_task(task: Task | type) -> Task: ...
@overload
def _instantiate_task(task: TaskLike | None) -> str | Task | None: ...
def _instantiate_task(task: TaskLike | None) -> str | Task | None:
    """Return an object of a task's class, and any other value unchanged."""
    return get_task(task()) if isinstance(task, type) else task


def _choices(
    model: object, settings: Mapping[str, Any], task_args: Mapping[str, object] | None
) -> tuple[dict[str, Any], ModelLoader]:
    """Return the user's choices by the names of settings, and the model."""
    choices = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(task_args or {}, Mapping):
        raise InputError(
            f"{arg('task_args')} must be a mapping of names to values, got {task_args!r:.60}"
        )
    if task_args:
        choices["extra"] = {name: str(value) for name, value in task_args.items()}
    if model is None or isinstance(model, str | Path):
        return choices if model is None else {**choices, "model": str(model)}, ModelLoader()
    from treegen.llm.base import BaseLLM

    if not isinstance(model, BaseLLM):
        raise InputError(
            f"model must be a name, an LLM or a Cluster, got {type(model).__name__}; use "
            "LLM(from_module(module), tokenizer=tokenizer) to make an LLM from a module"
        )
    return choices, ModelLoader(model)


def _run_name(task: str | Task | None, choices: Mapping[str, Any], models: ModelLoader) -> str:
    """Return a folder name with the task and the model of a run."""
    name = "" if task is None else get_task_name(task)
    loaded = None if models.llm is None else models.llm.model_info.engine.model
    model = short_model_name(str(loaded or choices.get("model", "demo")))
    # A task in a file is named path/to/file.py:Class.
    return file_name("-".join(filter(None, (name.rpartition("/")[2], model.rpartition("/")[2]))))


class _OutputDirectory:
    """The directory of a run. After an error a temporary directory is kept for its samples."""

    def __init__(
        self,
        output: str | Path | None,
        resume: bool | str | Path,
        choices: Mapping[str, Any],
        name: str,
    ) -> None:
        """Name the directory.

        Args:
            output: The directory that the user names; None for a temporary one.
            resume: As for `evaluate`.
            choices: The user's choices, by name.
            name: The name of a temporary run: its task and its model.
        """
        for argument, value in (("output", output), ("resume", resume)):
            if value is not None and not (argument == "resume" and isinstance(value, bool)):
                as_path(argument, value)
        self.resume = None if resume is False else "" if resume is True else str(resume)
        self._allowed = bool(choices.get(ALLOW_TASK_CODE))
        self._temporary: Path | None = None
        if output is None and self.resume is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="treegen-"))
            output = self._temporary / name
        self.output = None if output is None else str(output)

    def __enter__(self) -> "_OutputDirectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self._temporary is not None:
            with suppress(OSError):
                self._temporary.rmdir()  # succeeds only if it is empty

    def run(
        self, path: Path, task: str | Task | None, verdicts: "RunVerdicts | None" = None
    ) -> Run:
        """Return the run in a directory; a temporary directory is removed with the result.

        Args:
            path: The directory.
            task: The task that was run.
            verdicts: The verdicts on the samples that are known.
        """
        custom = None if isinstance(task, str) and code_of(task) is None else task
        run = Run(load_run(path, verdicts, task=custom, allow_task_code=self._allowed))
        if self._temporary is not None:
            weakref.finalize(run, shutil.rmtree, self._temporary, ignore_errors=True)
        return run
