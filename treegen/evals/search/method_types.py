"""Types of search methods: their settings, and the context in which they search a problem.

Also the names of the ways to choose an answer, to propose steps and to evaluate states.
"""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from treegen.evals.config.type_checks import Count, Minimum
from treegen.evals.search.method_arguments import Argument

if TYPE_CHECKING:
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import SearchOutcome

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

    acts: bool
    """Whether steps are tool calls of an agent, and not pieces of a text."""

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

    async def ask(self, node: "SearchNode", text: str, max_tokens: int) -> str:
        """Return the model's answer to a question about an episode of an agent."""

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
    needs_text: bool = False
    """Whether it works on texts alone, and not on the steps of an agent."""
    needs_agent: bool = False
    """Whether it works on the steps of an agent alone."""
    arguments: tuple[Argument, ...] = ()
    """Its own arguments, which users give by name; `run` takes them as keywords."""
    source: str | None = None
    """A hash of its file; None if it comes with treegen."""
