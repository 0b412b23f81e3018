"""Types of search methods: their settings, and the context in which they search a problem.

Also the ways to choose an answer, to propose steps and to evaluate states.
"""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from treegen.evals.config.type_checks import Count, Minimum
from treegen.evals.search.method_arguments import Argument

if TYPE_CHECKING:
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import SearchOutcome
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treegen.evals.problem import Problem
from treegen.evals.search.task import SearchTask
from treegen.search.evaluate import Evaluate, mean_logprob, min_logprob
from treegen.search.tree.node import SearchNode

if TYPE_CHECKING:
    from treegen.model.scorers.verifier import Verifier

# Ways to choose the answer from the solutions that a method has found.
CHOOSE: Final = {
    "best": "the one that the evaluation finds best",
    "vote": "the answer of most weight, each solution weighing what the evaluation makes of it",
}
# Ways that all tasks share; a task may have further ways.
PROPOSE: Final = ("sample",)
EVALUATE: Final = ("logprob", "min-logprob")
# reward:DIR evaluates states with the reward model in a directory.
REWARD: Final = "reward:"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """The settings that shape a tree."""

    width: Count
    """States to keep at a time."""
    depth: Count
    """The largest number of steps of a solution."""
    expand: Count
    """Next steps to try in a state."""
    num_samples: Count
    """The largest number of solutions that best-of-n and a majority vote draw."""
    propose: str
    """The way to make next steps."""
    evaluate: str
    """The way to evaluate states."""
    prune_below: float | None = None
    """Depth-first search prunes states of a lower value; None prunes none."""
    exploration: Annotated[float, Minimum(0)] = 1.4
    """The constant of MCTS."""
    iterations: Count = 1000
    """The largest number of visits of MCTS to the tree."""
    rollouts: Annotated[int, Minimum(0)] = 1
    """The number of samples that MCTS completes from a new state. With 0 it uses the value of the
    state itself."""


class MethodContext(Protocol):
    """The context of a method: one problem, with the functions that strategies call."""

    root: "SearchNode"
    """The root of the problem's tree."""
    knobs: TreeSettings
    """The settings that shape the tree."""
    checkable: bool
    """Whether the problem alone decides if a solution is correct."""

    def done(self, node: "SearchNode") -> bool:
        """Return whether a node ends a solution."""

    def is_solved(self, node: "SearchNode") -> bool:
        """Return whether a node is a correct solution; False if the problem alone cannot decide."""

    def state(self, node: "SearchNode") -> Hashable:
        """Return the state of a node. States are equal if the same steps can follow."""

    def answer(self, node: "SearchNode") -> str | None:
        """Return the answer of a solution; None if it has none."""

    async def step(self, node: "SearchNode", n: int) -> "Sequence[SearchNode]":
        """Sample n next steps."""

    async def finish(self, node: "SearchNode", n: int) -> "Sequence[SearchNode]":
        """Sample n whole solutions from a node on."""

    def instruct(self, node: "SearchNode", text: str) -> "SearchNode":
        """Append an instruction to a node, such as a request for feedback."""

    async def propose(self, node: "SearchNode") -> "Sequence[SearchNode]":
        """Make next steps in the way named by the knobs."""

    async def evaluate(self, nodes: "Sequence[SearchNode]") -> list[float]:
        """Return the values of nodes, evaluated in the way named by the knobs."""

    async def chance(self, nodes: "Sequence[SearchNode]") -> list[float]:
        """Return values of nodes from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to search one problem."""

    run: "Callable[..., Awaitable[SearchOutcome]]"
    """Searches once."""
    knobs: tuple[str, ...]
    """Names of the settings that it reads."""
    votes: bool = False
    """Whether it chooses its answer by its own vote."""
    on_scale: bool = False
    """Whether the values of its nodes are from 0 to 1, however they are evaluated."""
    ends_early: bool = True
    """Whether one correct solution ends the whole search. It is False if parts of the tree grow
    independently, because the tree would then depend on what else runs."""
    joins_path: bool = True
    """Whether a solution is the text of the whole path to its node, and not of the node alone."""
    arguments: tuple[Argument, ...] = ()
    """Its own arguments, which users give by name; `run` takes them as keywords."""
    source: str | None = None
    """A hash of its file; None if it comes with treegen."""


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
