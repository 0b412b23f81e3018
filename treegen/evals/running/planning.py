"""Plans the runs of tasks from a model's configuration, without its weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treegen import demo
from treegen.errors import InputError
from treegen.evals.asked.given import check_read
from treegen.evals.asked.settings import settle
from treegen.evals.job import first_prompt, load_job, plan_job
from treegen.evals.model import look_at_model
from treegen.evals.running.listener import Listener
from treegen.evals.running.work import tell_demo, tell_skipped

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.model.facts import ModelFacts
    from treegen.plan.plan import Plan


def plan_tasks(
    tasks: Sequence[str],
    asked: Mapping[str, Any],
    listener: Listener,
    *,
    show_prompts: bool = False,
) -> "Iterator[tuple[Job, ModelFacts, Plan]]":
    """Yield the job, the model's facts and the plan of each task's run.

    Args:
        tasks: Names of tasks.
        asked: The user's choices, by the names of settings.
        listener: Gets notices.
        show_prompts: Whether the listener also gets the first prompt of each task.

    Raises:
        InputError: There is no task, or a choice cannot be used.
        TreegenError: The data, the model's configuration or the plan is in error.
    """
    if not tasks:
        raise InputError("no task is given; `treegen tasks` lists them")
    jobs = [load_job(settle(demo.completed({**asked, "task": task}))) for task in tasks]
    check_read(asked, [job.settings for job in jobs])
    tell_demo(asked, [job.settings for job in jobs], listener)
    for job in jobs:
        tell_skipped(job, listener)
        facts = look_at_model(job.settings.engine)
        plan = plan_job(job, facts)
        if show_prompts:
            listener.show_prompt(first_prompt(job, facts))
        yield job, facts, plan
