"""A search run before weights are loaded: its problems and their prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treegen.errors import CapacityError, InputError, arg
from treegen.evals.job import AnyJob, load_task_data
from treegen.evals.problem import Problem
from treegen.evals.search.agent_task import AgentTask
from treegen.evals.search.method_types import REWARD
from treegen.evals.search.settings import SearchSettings
from treegen.evals.search.task import SearchTask, get_search_task
from treegen.evals.task_calls import wrap_task_method
from treegen.prompts.tool_turns import ToolTurns
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class SearchJob(AnyJob):
    """A task with its problems, their prompts, and the settings of their searches."""

    settings: SearchSettings
    task: SearchTask
    roots: Mapping[str, str]
    """The prompt of each problem, by problem id."""
    problems: Mapping[str, Problem]
    """The problems, by id."""
    searches: Mapping[str, tuple[str, int]]
    """By search name, the problem's id and the search's index among the problem's searches."""

    @property
    def planned(self) -> int:
        """The number of searches in the finished run."""
        return len(self.roots) * self.settings.repeats


def load_search_job(settings: SearchSettings) -> SearchJob:
    """Load a task with its problems and prompts.

    Raises:
        DataError, InputError: the task, data or arguments cannot be used, or two searches have
            one name.
        TaskError: the task's own code fails.
    """
    task = get_search_task(settings.task)
    task.configure(settings.options.extra)
    load = None
    if isinstance(task, AgentTask) and settings.environment is not None:
        load = partial(task.load_for, environment=settings.environment)
    data = load_task_data(task, settings.options, load)
    problems = {problem.id: problem for problem in data.problems}
    roots = {
        problem_id: wrap_task_method(task.root, task.name, problem_id)(data, problem)
        for problem_id, problem in problems.items()
    }
    return SearchJob(
        settings, task, data, roots, problems, search_names(list(roots), settings.repeats)
    )


def search_names(problem_ids: Sequence[str], repeats: int) -> dict[str, tuple[str, int]]:
    """Return, by search name, the problem's id and the index among the problem's searches.

    The first search of a problem is named by the problem's id, so its name does not depend on
    `repeats`.

    Raises:
        InputError: two searches have one name.
    """
    searches: dict[str, tuple[str, int]] = {}
    for repeat in range(repeats):
        for problem_id in problem_ids:
            name = f"{problem_id} #{repeat + 1}" if repeat else problem_id
            if name in searches:
                raise InputError(
                    f"problem id {name!r} is the same as the name that {arg('repeats=')} gives "
                    f"to a search of another problem; change the id, or remove {arg('repeats=')}"
                )
            searches[name] = problem_id, repeat
    return searches


def check_prompts_fit(job: SearchJob, model_info: "ModelInfo") -> None:
    """Check that every prompt fits the model with one whole solution.

    Raises:
        InputError: the prompts are chats, and the model has no chat template.
        CapacityError: a prompt leaves no room for a whole solution in the model's context.
        CacheFullError: a prompt does not fit in memory with a whole solution.
    """
    if job.settings.environment is not None:
        ToolTurns(model_info.tokenizer, ())  # raises without a chat template
        return  # the chat template and the tools belong to the prompts, which the engine checks
    from treegen.prompts.plan.requests import check_length, requests_of_prompts
    from treegen.prompts.tokens import tokenize

    leaves = [Node(root, id=name, samples=1) for name, root in job.roots.items()]
    tree, tokenizer = Node("", children=leaves, samples=0), model_info.tokenizer
    check_length(tree, tokenizer, model_info.spec, model_info.images)
    prompts = tokenize(tree, tokenizer, model_info.images)
    max_tokens, context = job.settings.solution.max_tokens, model_info.spec.context_length
    for prompt in prompts:
        length = len(prompt.tokens)
        if length + max_tokens > context:
            raise CapacityError(
                f"the prompt of {prompt.id!r} has {length:,} tokens; with {max_tokens:,} to sample "
                f"that is more than the model's context of {context:,}; lower "
                f"{arg('num_fewshot=')} or {arg('max_tokens=')}"
            )
    if model_info.num_pages is not None:  # otherwise it is known only after the model is loaded
        params, spec, images = job.settings.solution, model_info.spec, model_info.images
        model_info.plan(requests_of_prompts(prompts, tokenizer, params, spec, images))


def check_reward(settings: SearchSettings) -> None:
    """Raise ModelError if the settings name a reward model that has no weights to load."""
    if settings.evaluate.startswith(REWARD):
        from treegen.model.checkpoint.files import check_weights, locate

        check_weights(locate(settings.evaluate.removeprefix(REWARD), None, weights=True))
