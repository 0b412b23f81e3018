"""One run of searches before any weight is loaded: prompts, and what a run must agree on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treegen.errors import CapacityError
from treegen.evals.arguments import check_arguments, known_arguments
from treegen.evals.calls import asked, load_data
from treegen.evals.search.names import REWARD
from treegen.evals.search.settings import SearchSettings, free, identity
from treegen.evals.search.task import SearchTask, get_search_task
from treegen.evals.task import TaskData
from treegen.prompts.tree import Node
from treegen.runs import RunSettings

if TYPE_CHECKING:
    from treegen.evals.job import ModelFacts


@dataclass(frozen=True, slots=True)
class SearchJob:
    """One task with its problems, their prompts, and how each is searched."""

    settings: SearchSettings
    task: SearchTask
    data: TaskData
    roots: Mapping[str, str]


def load_search_job(settings: SearchSettings) -> SearchJob:
    """Return a task's problems and prompts; raise DataError or InputError for what cannot run."""
    task = get_search_task(settings.task)
    check_arguments(task.name, settings.options.extra, known_arguments(task))
    data = load_data(task, asked(task.load, task.name)(settings.options))
    roots = {
        problem.id: asked(task.root, task.name, problem.id)(data, problem)
        for problem in data.problems
    }
    return SearchJob(settings, task, data, roots)


def check_prompts_fit(job: SearchJob, facts: "ModelFacts") -> None:
    """Raise CapacityError for a prompt that leaves no room for a whole solution."""
    most, context = job.settings.whole.max_tokens, facts.spec.context_length
    for name, root in job.roots.items():
        length = len(facts.tokenizer(root).input_ids)
        if length + most > context:
            raise CapacityError(
                f"the prompt of {name!r} has {length:,} tokens; with {most:,} to sample that is "
                f"more than the model's context of {context:,}; lower --num-fewshot or --max-tokens"
            )


def check_memory(job: SearchJob, facts: "ModelFacts") -> None:
    """Raise CacheFullError for a prompt that does not fit with one whole solution even alone."""
    from treegen.plan.requests import plan_requests, sample_requests

    if facts.num_pages is None:  # only the loaded model can say
        return
    leaves = [Node(root, id=name, samples=1) for name, root in job.roots.items()]
    tree = Node("", children=leaves, samples=0)
    plan = plan_requests(
        sample_requests(tree, facts.tokenizer, job.settings.whole, facts.spec),
        facts.spec,
        device_type=facts.device_type,
        sharing=facts.engine.sharing,
        max_rows=facts.max_rows,
    )
    plan.check_fits(facts.num_pages, facts.page_size)


def search_run_settings(
    job: SearchJob, *, dtype: str, fingerprint: str, flags: Mapping[str, str]
) -> RunSettings:
    """Return what a run of searches stores and, when it is resumed, compares.

    fingerprint: of the weights. flags: how the user sets each field, for messages.
    """
    problems = [problem.content for problem in job.data.problems]
    return RunSettings(
        identity={
            "task": {"name": job.task.name, "version": job.task.version},
            "data": {"problems": _hash(problems), "fewshot": _hash(job.data.examples)},
            "model": {"fingerprint": fingerprint, "dtype": dtype},
            **identity(job.settings),
        },
        problem_ids=[problem.id for problem in job.data.problems],
        planned=len(job.data.problems),
        free=free(job.settings),
        flags=flags,
    )


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()[:32]


def check_reward(settings: SearchSettings) -> None:
    """Raise ModelError if the settings name a reward model that has no weights to load."""
    if settings.evaluate.startswith(REWARD):
        from treegen.model.files import check_weights, locate

        check_weights(locate(settings.evaluate.removeprefix(REWARD), None, weights=True))
