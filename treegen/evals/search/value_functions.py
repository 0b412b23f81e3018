"""Ways to evaluate states: those that all tasks share, and a task's own."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from treegen.evals.problem import Problem
from treegen.evals.search.method_types import REWARD
from treegen.evals.search.task import SearchTask
from treegen.search.evaluate import Evaluate, mean_logprob, min_logprob
from treegen.search.tree.node import SearchNode

if TYPE_CHECKING:
    from treegen.model.scorers.verifier import Verifier

# Lower than the mean log-probability of any state that is not a dead end.
_LOST: Final = -1e6


@dataclass(frozen=True, slots=True)
class ValueFunction:
    """A way to evaluate states."""

    evaluate: Evaluate
    """Returns the values of nodes."""
    lost: float
    """The value of a dead end."""
    won: float
    """The value of a correct solution."""
    chance: Callable[[float], float]
    """Maps a value to a scale from 0 to 1."""


def own_value_function(task: SearchTask, problem: Problem, how: str) -> ValueFunction:
    """Return one of the task's own ways to evaluate states.

    Args:
        task: The task, whose `SearchDefaults.evaluate` has the way.
        problem: The problem that is searched.
        how: The name of the way.
    """
    worth = task.search_defaults.worth
    return ValueFunction(task.evaluate(problem, how), 0.0, worth, lambda value: value / worth)


def verifier_value_function(verifier: "Verifier", problems: Mapping[str, Problem]) -> ValueFunction:
    """Return the evaluation of states by a verifier.

    Args:
        verifier: The verifier.
        problems: Problems by the names of searches.
    """
    from treegen.search.reward import by_verifier

    def question_of(node: SearchNode) -> str:
        # The solved examples are left out, because they say nothing about this solution.
        return problems[node.search.name].question

    judge = by_verifier(verifier, question_of=question_of)
    return ValueFunction(judge, 0.0, 1.0, lambda value: value)


def general_value_function(
    how: str,
    problems: Mapping[str, Problem],
    *,
    verifier_args: Mapping[str, Any] | None = None,
    memory: str | None = None,
) -> ValueFunction | None:
    """Return a way to evaluate states that every task has; None if it is one of the task's own.

    Args:
        how: The name of the way.
        problems: Problems by the names of searches.
        verifier_args: How a verifier is read.
        memory: The verifier's cache size.
    """
    if how.startswith(REWARD):
        from treegen.search.reward import MEMORY, load_verifier

        name = how.removeprefix(REWARD)
        verifier = load_verifier(name, memory=memory or MEMORY, **(verifier_args or {}))
        return verifier_value_function(verifier, problems)
    function = {"logprob": mean_logprob, "min-logprob": min_logprob}.get(how)
    if function is None:
        return None
    return ValueFunction(function, _LOST, 0.0, lambda value: math.exp(min(0.0, value)))
