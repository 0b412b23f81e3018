"""Helpers that strategies share: ranking, pruning, and the outcome of a search.

A strategy keeps all that it knows in the tree itself: nodes, their values, and which are pruned. So
the outcome can be read from the tree wherever a budget ends the strategy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Final, TypeVar

from treegen.search.budget import BudgetReached
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.event_loop import gather
from treegen.search.external_calls import walk_key_of
from treegen.search.propose import Propose
from treegen.search.tree.node import SearchNode, is_ended
from treegen.search.tree.result import SearchOutcome

_LIMITS: Final = {
    "tokens": "tokens_decoded",
    "calls": "calls",
    "nodes": "nodes",
    "actions": "actions",
}
"""For each limit of a budget, the field of the usage that it bounds."""
T = TypeVar("T")

Done = Callable[[SearchNode], bool]
"""Whether a node ends a solution, right or wrong. It may be called several times for a node."""

DUPLICATE: Final = "duplicate"
OUTRANKED: Final = "outranked"
TOO_LOW: Final = "value too low"
DEAD_END: Final = "dead end"
TOO_DEEP: Final = "too deep"
ALL_PRUNED: Final = "all below pruned"
"""Reasons for pruning a node, as records show them."""

State = Callable[[SearchNode], Hashable]
"""Returns the state of a node. Of several nodes with equal states only the first is followed."""


def text_state(node: SearchNode) -> Hashable:
    """Return the text of a node's path, and whether the model has ended it."""
    return node.path_text, is_ended(node)


async def propose_all(nodes: Iterable[SearchNode], propose: Propose) -> list[SearchNode]:
    """Return the next steps of all nodes, proposed concurrently, in the order of the nodes."""
    return [step for steps in await gather(map(propose, nodes)) for step in steps]


async def assess(nodes: Sequence[SearchNode], evaluate: Evaluate) -> None:
    """Set the value of each node to the value that `evaluate` gives it."""
    for node, value in zip(nodes, await evaluate_nodes(nodes, evaluate), strict=True):
        node.value = value


def rank(nodes: Iterable[SearchNode]) -> list[SearchNode]:
    """Sort nodes by value, best first; ties by place in the tree, nodes without a value last.

    Nodes that are pruned, such as those whose evaluation failed, are left out.
    """
    return sorted(
        (node for node in nodes if not node.pruned),
        key=lambda node: (node.value is None, -(node.value or 0.0), walk_key_of(node)),
    )


def split(
    nodes: Sequence[SearchNode], prune_below: float
) -> tuple[list[SearchNode], list[SearchNode]]:
    """Split nodes into those of value at least `prune_below` and the rest, each list best first."""
    ranked = rank(nodes)
    num_good = sum(node.value is not None and node.value >= prune_below for node in ranked)
    return ranked[:num_good], ranked[num_good:]


def prune(nodes: Iterable[SearchNode], root: SearchNode, because: str = "") -> None:
    """Prune nodes and free their pages.

    A parent below root is pruned as well once all of its children are pruned.

    Args:
        nodes: Nodes to prune.
        root: Node that the strategy searches below; it is never pruned as a parent.
        because: The reason in a few words, for records.
    """
    for node in nodes:
        reason = because
        while True:
            node.pruned_because = node.pruned_because or reason
            node.pruned = True
            node.free()
            reason = ALL_PRUNED
            above = node.parent
            if above is None or node is root or above is root:
                break
            if not all(child.pruned for child in above.children):
                break
            node = above


def drop_duplicates(
    nodes: Iterable[SearchNode], state: State, seen: set[Hashable], root: SearchNode
) -> list[SearchNode]:
    """Keep the first node of each state that is not in `seen`, and prune the rest.

    Args:
        nodes: New nodes, in the order in which they are kept.
        state: Returns the state of a node.
        seen: States seen so far; the states of `nodes` are added.
        root: Node that the strategy searches below.
    """
    unique: list[SearchNode] = []
    duplicates: list[SearchNode] = []
    for node in dict.fromkeys(nodes):
        key = state(node)
        (duplicates if key in seen else unique).append(node)
        seen.add(key)
    prune(duplicates, root, DUPLICATE)
    return unique


async def run_until_budget(search: Awaitable[str]) -> str:
    """Return why a search stopped early, by itself or by its budget; "" if it did not."""
    try:
        return await search
    except BudgetReached as end:
        return str(end)


async def collect_outcome(
    root: SearchNode, done: Done, evaluate: Evaluate, stopped: str, *, inner: bool = False
) -> SearchOutcome:
    """Return the outcome of a search, read from the tree below root.

    Candidates are the leaves that are done and not pruned. Candidates without a value are evaluated
    now. If the budget does not allow that, they come last.

    Args:
        root: Node that the strategy searched below; it is no candidate.
        done: Whether a node ends a solution.
        evaluate: Gives nodes their values.
        stopped: Why the search ended early; "" if it did not.
        inner: Whether nodes with children are candidates too.
    """
    nodes = [node for node in root.walk() if not node.pruned and node is not root]
    leaves = [node for node in nodes if inner or node.is_leaf]
    finished = [node for node in leaves if done(node)]
    try:
        await assess([node for node in finished if node.value is None], evaluate)
    except BudgetReached as end:
        stopped = stopped or str(end)
    candidates = rank(finished)
    best = next(iter(candidates or rank(leaves)), None)
    return SearchOutcome(best, tuple(candidates), stopped=stopped)


class Costs:
    """Tokens, calls and nodes that each kind of work has taken from a search's budget so far."""

    def __init__(self, search: BudgetedSearch) -> None:
        """Start without any measured costs."""
        self._usage = search.usage
        self._limits = {
            name: limit for name in _LIMITS if (limit := getattr(search.budget, name)) is not None
        }
        self._num: Counter[str] = Counter()
        self._taken: defaultdict[str, Counter[str]] = defaultdict(Counter)

    async def of(self, kind: str, num: int, call: Awaitable[T]) -> T:
        """Await a call and record what it used as the cost of `num` items of a kind.

        Args:
            kind: Name of the kind of work.
            num: Items that the call computes.
            call: The call to await.

        Returns:
            What the call returns.
        """
        before = self._read_usage()
        returned = await call
        self._num[kind] += num
        self._taken[kind].update(self._read_usage() - before)
        return returned

    @property
    def is_limited(self) -> bool:
        """Whether the budget has a limit other than seconds."""
        return bool(self._limits)

    def fits_budget(self, **nums: int) -> bool:
        """Return whether the budget has room for `nums` items of each kind, at their mean costs.

        A kind without measured costs counts as free.
        """
        spent = self._read_usage()
        return all(
            spent[name] + sum(self._mean(kind, name) * num for kind, num in nums.items()) <= limit
            for name, limit in self._limits.items()
        )

    def most(self, num: int, *kinds: str) -> int:
        """Return how many of `num` items fit the budget, each with one of all kinds; at least 1."""
        sizes = range(num, 1, -1)
        return next((size for size in sizes if self.fits_budget(**dict.fromkeys(kinds, size))), 1)

    def _mean(self, kind: str, name: str) -> float:
        return self._taken[kind][name] / max(1, self._num[kind])

    def _read_usage(self) -> Counter[str]:
        return Counter({name: getattr(self._usage, _LIMITS[name]) for name in self._limits})
