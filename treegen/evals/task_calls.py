"""Calls of a task's own code. Their errors name the task, the method and the problem."""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from treegen.errors import TaskError, TreegenError
from treegen.evals.problem import Problem
from treegen.evals.statistics.confidence import STOPPED
from treegen.evals.task import Task, TaskData
from treegen.evals.thinking import get_answer_text
from treegen.evals.verdict import Verdict

P = ParamSpec("P")
T = TypeVar("T")


def wrap_task_method(
    method: Callable[P, T], task: str, problem: str | None = None
) -> Callable[P, T]:
    """Return a task's method wrapped so that it raises TaskError if it fails.

    A TreegenError that the method raises on purpose, such as DataError, is not changed. But if
    `problem` is given it becomes a TaskError too, because the method did not know the problem's id.

    Args:
        method: The task's method.
        task: The task's name, for the message.
        problem: The problem's id, for the message; None if the method is not about one problem.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (Exception, SystemExit) as error:
            on_purpose = isinstance(error, TreegenError) and problem is None
            if on_purpose or isinstance(error, MemoryError):
                raise
            name = getattr(method, "__name__", "a method")
            raise _failure(name, task, problem, error) from error

    return call


def _failure(method: str, task: str, problem: str | None, error: BaseException) -> TaskError:
    of = "" if problem is None else f" of problem {problem!r}"
    return TaskError(f"{method}{of} fails in task {task!r}: {format_error(error)}")


def format_error(error: BaseException) -> str:
    """Return an error in one line, with the place in the called code if it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[1].filename).name}:{frames[1].lineno})" if len(frames) > 1 else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def check_data(task: Task, data: object) -> TaskData:
    """Return `data`, which a task has loaded; raise TaskError if it is not a valid TaskData."""
    if not isinstance(data, TaskData):
        raise _make_task_error(task, "load", f"must return a TaskData, got {type(data).__name__}")
    for number, problem in enumerate(data.problems):
        if not isinstance(problem, Problem):
            raise _make_task_error(
                task,
                "load",
                f"must return objects of the class Problem, got {problem!r:.60} as "
                f"problem {number}",
            )
        for name in ("id", "question", "answer"):
            value = getattr(problem, name)
            if not isinstance(value, str):
                what = f"must set the {name} of problem {problem.id!r} to text, got {value!r:.60}"
                raise _make_task_error(task, "load", what)
    return data


def score_text(task: Task, problem: Problem, text: str) -> dict[str, Verdict]:
    """Return a task's verdicts on a text, at least one for each filter.

    Args:
        task: The task.
        problem: The problem that the text answers.
        text: The text to score.

    Raises:
        TaskError: `score` fails, or returns no Verdict for a filter.
    """
    try:  # as `wrap_task_method` does, which would create a function for each sample
        verdicts = task.score(problem, text)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure("score", task.name, problem.id, error) from error
    verdict_of = verdicts if type(verdicts) is dict or isinstance(verdicts, Mapping) else {}
    for name in task.filters:
        if not isinstance(verdict_of.get(name), Verdict):
            raise _make_task_error(
                task,
                f"score of problem {problem.id!r}",
                f"must return a Verdict for each filter ({', '.join(task.filters)}), got "
                f"{verdicts!r:.80}",
            )
    return verdicts


def score_record(task: Task, problem: Problem, record: Mapping[str, Any]) -> Mapping[str, Verdict]:
    """Return the verdicts on a stored sample; a sample stopped for low confidence has no vote.

    The text of such a sample is cut, so it has no answer.

    Args:
        task: The task.
        problem: The problem that the sample answers.
        record: The sample's line of samples.jsonl.

    Raises:
        TaskError: the task's `verdicts` or `score` fails, `verdicts` returns no mapping of
            Verdicts, or `score` returns no Verdict for a filter.
    """
    if record["finish_reason"] == STOPPED:
        return {name: Verdict(None, False) for name in task.filters}
    if type(task).verdicts is not Task.verdicts:
        verdicts = wrap_task_method(task.verdicts, task.name, problem.id)(problem, record)
        if verdicts is not None:
            # A log of another tool may have verdicts by some of the filters only.
            if not isinstance(verdicts, Mapping) or not all(
                isinstance(verdict, Verdict) for verdict in verdicts.values()
            ):
                raise _make_task_error(
                    task,
                    f"verdicts of problem {problem.id!r}",
                    f"must return a mapping of Verdicts by filter, or None; got {verdicts!r:.80}",
                )
            return verdicts
    return score_text(task, problem, get_answer_text(record))


def _make_task_error(task: Task, method: str, what: str) -> TaskError:
    return TaskError(f"{method} of task {task.name!r} {what}; fix the task")
