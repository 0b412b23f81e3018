"""The prompt tree that most tasks have."""

from collections.abc import Callable

from treegen.evals.chat import with_turns
from treegen.evals.problem import Problem
from treegen.evals.task import TaskData
from treegen.prompts.tree import Node


def examples_above_problems(
    data: TaskData, num_samples: int, ask: Callable[[Problem], str]
) -> Node:
    """Return examples -> problems -> samples: two levels that samples share.

    ask: returns the prompt of a problem, as it stands below the examples.
    """
    children = [Node(ask(problem), samples=num_samples, id=problem.id) for problem in data.problems]
    return with_turns(Node(data.fewshot, children=children), data.turns)
