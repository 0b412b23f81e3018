"""Plans the runs of tasks from a model's configuration, without its weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treegen import demo
from treegen.errors import InputError
from treegen.evals.config.base import check_no_unused
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.job import PreparedJob, first_prompt, load_job, prepare_job
from treegen.evals.model import load_model_facts
from treegen.evals.pipeline.execution import announce_demo_model, tell_skipped
from treegen.evals.pipeline.listener import Listener


def plan_tasks(
    tasks: Sequence[str],
    asked: Mapping[str, Any],
    listener: Listener,
    *,
    show_prompts: bool = False,
) -> Iterator[PreparedJob]:
    """Yield the prepared job of each task's run.

    Args:
        tasks: Names of tasks.
        asked: The user's choices, by the names of settings.
        listener: Receives notices.
        show_prompts: Whether the listener also gets the first prompt of each task.

    Raises:
        InputError: There is no task, or a choice cannot be used.
        TreegenError: The data, the model's configuration or the plan is in error.
    """
    if not tasks:
        raise InputError("no task is given; `treegen tasks` lists them")
    jobs = [
        load_job(resolve_eval_settings(demo.fill_defaults({**asked, "task": task})))
        for task in tasks
    ]
    check_no_unused(asked, [job.settings for job in jobs])
    announce_demo_model(asked, [job.settings for job in jobs], listener)
    for job in jobs:
        tell_skipped(job, listener)
        facts = load_model_facts(job.settings.engine)
        prepared = prepare_job(job, facts)
        if show_prompts:
            listener.show_prompt(first_prompt(prepared.job, facts.tokenizer))
        yield prepared
