"""What the strategies share: ranking, pruning, and how a search ends.

A strategy keeps what it knows in the tree itself: values, what is pruned, what hangs below what.
So when a budget ends it, at whatever point, its outcome is read from the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from treegen.errors import InputError
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, values_of
from treegen.search.loop import gather
from treegen.search.node import SearchNode, ended
from treegen.search.propose import Propose
from treegen.search.result import Found

Done = Callable[[SearchNode], bool]
"""Whether a node is the end of a solution, right or wrong. Asked more than once of a node."""

State = Callable[[SearchNode], Hashable]
"""What a node stands for: of nodes with equal states only the first is followed."""


def text_state(node: SearchNode) -> Hashable:
    """Two nodes are the same state if their texts are equal and both or neither have ended."""
    return node.path_text, ended(node)


async def propose_all(nodes: Iterable[SearchNode], propose: Propose) -> list[SearchNode]:
    """Next steps of all nodes, side by side; those of the first node come first."""
    return [step for steps in await gather(map(propose, nodes)) for step in steps]


async def assess(nodes: Sequence[SearchNode], evaluate: Evaluate) -> None:
    """Set the values of nodes."""
    for node, value in zip(nodes, await values_of(nodes, evaluate), strict=True):
        node.value = value


def rank(nodes: Iterable[SearchNode]) -> list[SearchNode]:
    """Sort nodes by value, the best first, ties by their place in the tree; unvalued ones last."""
    return sorted(nodes, key=lambda node: (node.value is None, -(node.value or 0.0), place(node)))


def split(
    nodes: Sequence[SearchNode], prune_below: float
) -> tuple[list[SearchNode], list[SearchNode]]:
    """Nodes of enough value and the others, each the best first."""
    ranked = rank(nodes)
    num_good = sum(node.value is not None and node.value >= prune_below for node in nodes)
    return ranked[:num_good], ranked[num_good:]


def place(node: SearchNode) -> tuple[tuple[int, int], ...]:
    """Where a node stands in its tree; places sort as `SearchNode.walk` yields."""
    return tuple(each.order for each in node.path)


def prune(nodes: Iterable[SearchNode], root: SearchNode) -> None:
    """Give nodes up and free their caches, and so for each parent below root with no other way."""
    for node in nodes:
        while True:
            node.pruned = True
            node.drop()
            above = node.parent
            if above is None or node is root or above is root:
                break
            if not all(child.pruned for child in above.children):
                break
            node = above


def distinct(
    nodes: Iterable[SearchNode], state: State, seen: set[Hashable], root: SearchNode
) -> list[SearchNode]:
    """Keep the first node of each state that was not seen before, and prune the others."""
    kept: list[SearchNode] = []
    twice: list[SearchNode] = []
    for node in dict.fromkeys(nodes):
        key = state(node)
        (twice if key in seen else kept).append(node)
        seen.add(key)
    prune(twice, root)
    return kept


async def conclude(root: SearchNode, done: Done, evaluate: Evaluate, stopped: str) -> Found:
    """Read from the tree below root what was found.

    Candidates are the leaves that are done and not pruned. Those without a value get theirs now;
    where the budget does not allow it, they stand last.
    """
    leaves = [node for node in root.walk() if node.is_leaf and not node.pruned and node is not root]
    finished = [node for node in leaves if done(node)]
    try:
        await assess([node for node in finished if node.value is None], evaluate)
    except BudgetReached as end:
        stopped = stopped or str(end)
    candidates = rank(finished)
    best = next(iter(candidates or rank(leaves)), None)
    return Found(best, tuple(candidates), stopped=stopped)


def check_counts(**counts: int | None) -> None:
    """Raise InputError unless each is a whole number of at least 1, or None."""
    for name, count in counts.items():
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {count!r}")
