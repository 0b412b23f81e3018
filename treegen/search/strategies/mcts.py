"""Monte Carlo tree search with upper confidence bounds (UCT, Kocsis and Szepesvari 2006)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, values_of
from treegen.search.node import SearchNode
from treegen.search.propose import Propose
from treegen.search.result import Found
from treegen.search.strategies.common import (
    DEAD_END,
    Done,
    State,
    check_counts,
    conclude,
    distinct,
    prune,
    text_state,
)


@dataclass(slots=True)
class Arm:
    """The visits of a node. total: the sum of the values that they gave."""

    visits: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """The mean value of the visits; 0 before the first."""
        return self.total / self.visits if self.visits else 0.0

    def bound(self, parent_visits: int, c: float) -> float:
        """The upper confidence bound: mean + c * sqrt(ln(parent_visits) / visits)."""
        if not self.visits:
            return math.inf
        return self.mean + c * math.sqrt(math.log(parent_visits) / self.visits)


async def mcts(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    iterations: int,
    c: float = 1.4,
    depth: int | None = None,
    enough: float = math.inf,
    state: State = text_state,
    arms: dict[SearchNode, Arm] | None = None,
) -> Found:
    """Visit the tree again and again, more often where its values are high.

    An iteration starts at the root and goes down to the child with the highest bound, until it
    comes to a node that is new, done or at the depth limit. The value of that node counts for all
    nodes on the way. The value of a node is the mean of what was counted. A node gets children at
    its second visit, the root at its first. Dead ends are pruned.

    evaluate: gets one node at a time; `rollouts` plays samples to their ends.
    iterations: most iterations.
    c: the weight of the bound's second term. The default fits values from 0 to 1.
    depth: most steps of a path.
    enough: the search ends at a solution of at least this value.
    state: of nodes with equal states only the first is kept.
    arms: a mapping to fill with the visits of each node, for callers who want to see them.
    """
    check_counts(iterations=iterations, depth=depth)
    arms = {} if arms is None else arms
    arms[root] = Arm()
    ways: dict[SearchNode, list[SearchNode]] = {}
    seen: set[Hashable] = {state(root)}

    async def descend() -> list[SearchNode]:
        """The path from the root to the node to evaluate; empty if no node is left."""
        path = [root]
        while path:
            node = path[-1]
            is_end = node is not root and done(node)
            is_new = node is not root and not arms[node].visits
            if is_end or is_new or (depth is not None and len(path) > depth):
                return path
            if node not in ways:
                ways[node] = distinct(await propose(node), state, seen, root)
                arms.update((child, Arm()) for child in ways[node])
            if ways[node]:
                visits = arms[node].visits
                path.append(max(ways[node], key=lambda child: arms[child].bound(visits, c)))
            else:
                path.pop()
                if path:
                    prune([node], root, DEAD_END)
                    ways[path[-1]].remove(node)
        return []

    stopped = ""
    try:
        for _ in range(iterations):
            path = await descend()
            if not path:
                break
            leaf = path[-1]
            is_solution = leaf is not root and done(leaf)
            if is_solution and arms[leaf].visits:
                value = arms[leaf].mean
            else:
                (value,) = await values_of([leaf], evaluate)
            for node in path:
                arms[node].visits += 1
                arms[node].total += value
                node.value, node.visits = arms[node].mean, arms[node].visits
            if is_solution and value >= enough:
                break
    except BudgetReached as end:
        stopped = str(end)
    return await conclude(root, done, evaluate, stopped)
