"""Search runs from settings to results: the work of `treegen search` and `search_task`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.spelling import did_you_mean
from treegen.errors import CacheFullError, InputError, Message, arg
from treegen.evals.config.base import check_no_unused, explain_moved_data
from treegen.evals.config.type_checks import check_choices
from treegen.evals.pipeline.execution import (
    ModelLoader,
    RunWork,
    announce_demo_model,
    execute_runs,
    prepare_runs,
)
from treegen.evals.pipeline.listener import Listener, Stop
from treegen.evals.pipeline.targets import search_destinations, tell_late_choices
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.search.custom_method import find_method
from treegen.evals.search.job import SearchJob, check_prompts_fit, check_reward, load_search_job
from treegen.evals.search.run import describe_ends, run_searches, write_search_results
from treegen.evals.search.searcher import ValueFunction, load_value_function
from treegen.evals.search.settings import SearchSettings
from treegen.model.options import EngineOptions
from treegen.runs import SearchRunDir

if TYPE_CHECKING:
    from treegen.evals.pipeline.execution import Before
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.evals.search.agent_search import RunAgent
    from treegen.llm.base import BaseLLM
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class SearchRunResult:
    """The result of a search run."""

    path: Path
    method: str
    results: Mapping[str, Any]
    """The content of results.json."""
    missing: int
    """The number of searches that are not done."""
    cache_full_errors: Sequence[CacheFullError]
    """The errors of searches that ran out of memory."""
    resume_hint: str
    """How to resume the run, for messages."""


@dataclass(frozen=True, slots=True)
class _Work(RunWork[SearchJob, SearchRunDir, SearchRunResult]):
    """A method and its open run."""

    value_function: ValueFunction | None = None
    cache_full_errors: dict[str, CacheFullError] = field(default_factory=dict)
    """Errors of searches that ran out of memory, by problem."""
    agent: "RunAgent | None" = None

    @property
    def title(self) -> str:
        return f"{self.job.task.name} {self.job.settings.method}"

    def steps(self, llm: "BaseLLM", stop: Stop) -> "Iterator[RunProgress]":
        return run_searches(
            self.job,
            self.run,
            llm,
            stop=stop,
            value_function=self.value_function,
            cache_full_errors=self.cache_full_errors,
            agent=self.agent,
        )

    def save_result(self, resume_hint: str) -> SearchRunResult:
        results = write_search_results(self.job, self.run)
        missing, method = max(self.run.missing, 0), self.job.settings.method
        cache_full_errors = list(self.cache_full_errors.values())
        return SearchRunResult(
            self.run.path, method, results, missing, cache_full_errors, resume_hint
        )


def search_all(
    methods: Sequence[str],
    choices: Mapping[str, Any],
    models: ModelLoader,
    listener: Listener,
    *,
    output: str | None = None,
    resume: str | None = None,
    compare: bool = False,
    execution: ExecutionOptions | None = None,
) -> list[SearchRunResult]:
    """Search the problems of a task by some methods, each in its own run directory.

    Args:
        methods: Names of methods; if empty, the task's default.
        choices: The user's choices, by the names of settings.
        models: Loads the models, or holds one that is loaded.
        listener: Receives messages and progress.
        output: As for `treegen.evals.pipeline.evaluation.evaluate_all`.
        resume: As for `treegen.evals.pipeline.evaluation.evaluate_all`.
        compare: Whether each method has its own directory below `output`.
        execution: Permission to run programs that the model wrote; None without it.

    Returns:
        The result of each method's run.

    Raises:
        InputError: the methods would not have the same problems and the same budget.
    """
    shared = _shared_arguments(dict(choices), methods)
    all_choices = models.choices(shared)
    targets = search_destinations(methods, all_choices, output, resume, compare=compare)
    check_no_unused(choices, [target.settings for target in targets])
    tell_late_choices(targets, choices, listener)
    announce_demo_model(
        all_choices, [target.settings for target in targets if not target.resume], listener
    )
    jobs = []
    for target in targets:
        keeps_data = target.resume and choices.get("data") is None
        with explain_moved_data(target.settings.options.data if keeps_data else None):
            jobs.append(load_search_job(target.settings))
    _check_alike(jobs)
    models.threads = next((target.threads for target in targets if target.threads), None)
    run_settings, _ = prepare_runs(jobs, models, listener, _check, targets)
    folder = targets[0].path.parent if compare and len(targets) > 1 else targets[0].path
    resume_hint = listener.resume_command(resume or folder, [target.settings for target in targets])

    def work(runs: Sequence[SearchRunDir], stack: ExitStack) -> "tuple[list[_Work], Before]":
        items = [_Work(job, run) for job, run in zip(jobs, runs, strict=True)]
        items, before = _load_value_function(items, models)
        items = [_open_agent(item, models, execution, listener, stack) for item in items]
        agents = [item.agent for item in items if item.agent is not None]
        for line in dict.fromkeys(line for a in agents for line in a.describe_environment()):
            listener.tell(line)
        return items, before

    results = execute_runs(
        SearchRunDir, targets, run_settings, work, models, listener, resume_hint, unit="searches"
    )
    for result in results:
        for sentence in describe_ends(result.results):
            listener.tell(sentence)
    return results


def _load_value_function(work: "list[_Work]", models: ModelLoader) -> "tuple[list[_Work], Before]":
    """Load the value functions here, or return functions with which workers load them."""
    # All methods have the same problems, so methods with one way to evaluate share its function.
    jobs = {item.job.settings.evaluate: item.job for item in work if item.run.missing > 0}
    loads = {how: partial(load_value_function, job.data, job.settings) for how, job in jobs.items()}
    if models.on_workers:
        return work, list(loads.values())
    functions = {how: load() for how, load in loads.items()}
    return [_Work(i.job, i.run, functions.get(i.job.settings.evaluate)) for i in work], []


def _open_agent(
    work: _Work,
    models: ModelLoader,
    execution: ExecutionOptions | None,
    listener: Listener,
    stack: ExitStack,
) -> _Work:
    """Return the work of a run with its agent, if it needs one.

    A finished run needs one to delete snapshots if its process was killed before it could.

    Args:
        work: The work.
        models: Loads the models.
        execution: Permission to run programs.
        listener: Receives messages.
        stack: Closes the agent.
    """
    settings = work.job.settings
    if settings.environment is None:
        return work
    from treegen.evals.search.agent_search import list_worlds, open_agent

    if work.run.missing <= 0:
        worlds = list_worlds(work.run)
        if worlds and execution is None:
            listener.tell(
                Message(
                    f"a killed process has left snapshots in {worlds[0].parent}; resume the run "
                    f"with {arg('allow_code_execution', True)} to delete the snapshots"
                )
            )
        elif worlds:
            try:
                stack.enter_context(open_agent(work.job, work.run, execution))
            except InputError as error:  # the run itself is complete
                listener.tell(Message(f"the snapshots of this run were not deleted: {error}"))
        return work
    if models.on_workers:
        raise InputError(
            f"the environment {settings.environment} is not supported with workers; remove "
            f"{arg('gpus=')}, {arg('workers=')} and {arg('ray=')}"
        )
    agent = stack.enter_context(open_agent(work.job, work.run, execution))
    for line in agent.describe_resume():
        listener.tell(line)
    return replace(work, agent=agent)


def _shared_arguments(choices: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Add the names of all methods' arguments if there are several methods.

    Raises:
        InputError: no method knows an argument that was given.
    """
    check_choices({"arguments": choices.get("arguments") or {}}, SearchSettings)
    if not choices.get("arguments"):
        return choices
    names = sorted({argument.name for name in methods for argument in find_method(name).arguments})
    for name in choices["arguments"]:
        if name not in names and name in EngineOptions.__dataclass_fields__:
            raise InputError(
                f"no method has an argument {name!r}; use {arg(name + '=')} to set this option "
                "of the model"
            )
        if name not in names and len(methods) > 1:
            hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
            raise InputError(f"none of the methods has an argument {name!r}{hint}")
    return {**choices, "also_arguments": tuple(names)} if len(methods) > 1 else choices


def _check_alike(jobs: "list[SearchJob]") -> None:
    """Raise InputError unless all methods have the same problems and the same budget."""
    if len({job.settings.budget for job in jobs}) > 1:
        raise InputError(
            "the methods have different budgets; give all methods the same budget with "
            f"{arg('budget=')}"
        )
    if len({(job.task.name, job.data.fingerprint) for job in jobs}) > 1:
        raise InputError(
            f"the methods have different problems; give all methods the same {arg('data=')}, "
            f"{arg('limit=')} and examples"
        )


def _check(job: SearchJob, model_info: "ModelInfo") -> None:
    check_prompts_fit(job, model_info)
    check_reward(job.settings)


def describe_missing(results: Sequence[SearchRunResult]) -> list[str]:
    """Return sentences on the searches that failed, and on those that are missing."""
    complaints: list[str] = []
    if failed := sum(result.results.get("num_failed", 0) for result in results):
        searches = "1 search" if failed == 1 else f"{failed:,} searches"
        complaints.append(f"{searches} failed; see the errors above")
    missing = sum(result.missing for result in results)
    if not missing:
        return complaints
    message = "1 search is missing" if missing == 1 else f"{missing:,} searches are missing"
    if errors := [error for result in results for error in result.cache_full_errors]:
        message += (
            f", {len(errors):,} of them because memory ran out "
            f"({errors[0].message.marked}); use a larger "
            f"{arg('memory=')}"
        )
    return [*complaints, Message(f"{message}; {results[0].resume_hint}")]
