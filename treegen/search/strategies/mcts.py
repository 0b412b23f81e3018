"""Monte Carlo tree search with upper confidence bounds (UCT, Kocsis and Szepesvari 2006)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from treegen.common.checks import check_argument_types, check_counts
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate, evaluate_nodes
from treegen.search.event_loop import gather
from treegen.search.propose import Propose
from treegen.search.strategies.common import (
    DEAD_END,
    Costs,
    Done,
    State,
    collect_outcome,
    drop_duplicates,
    prune,
    text_state,
)
from treegen.search.strategies.node_statistics import (
    DEFAULT,
    MCTSRules,
    NodeStatistics,
    TreeStatistics,
    make_statistics,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def mcts(  # noqa: PLR0913 -- users name these settings of a search
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    iterations: int,
    c: float = 1.4,
    depth: int | None = None,
    target_value: float = math.inf,
    batch: int = 1,
    rules: MCTSRules = DEFAULT,
    priors: Evaluate | None = None,
    state: State = text_state,
    statistics: dict[SearchNode, NodeStatistics] | None = None,
) -> SearchOutcome:
    """Visit the tree repeatedly, more often where its values are high.

    A visit starts at the root and descends to the child with the highest bound, until it reaches a
    node that is new, done or at the depth limit. The value of that node counts for all nodes on the
    path. A node gets children at its second visit, the root at its first. Dead ends are pruned.

    Args:
        root: Node to search below.
        propose: Makes the next steps of a node.
        evaluate: Gives the nodes of a batch their values; `rollouts` plays samples to their ends.
        done: Whether a node ends a solution.
        iterations: Maximum number of visits.
        c: Weight of the bound's second term; 1.4 fits values from 0 to 1.
        depth: Maximum number of steps of a path; None is no limit.
        target_value: A solution of at least this value ends the search.
        batch: Concurrent visits. Each is steered away from those chosen before it. A visit that
            would reach the same node is left out, and so are visits for which the budget has no
            room at the costs so far.
        rules: How visits count, and which solution comes first.
        priors: Gives weights of siblings, such as `likelihood_priors`. Bounds are then those of
            AlphaZero.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
        statistics: Mapping to fill with the statistics of each node, for callers that inspect them.
    """
    check_counts(iterations=iterations, depth=depth, batch=batch)
    statistics = {} if statistics is None else statistics
    statistics[root] = NodeStatistics()
    tree, costs = TreeStatistics(statistics, c, rules), Costs(root.search)
    visits = _Visits(root, propose, done, depth, priors, state, tree, costs, {state(root)})
    stopped, remaining = "", iterations
    try:
        while remaining and (paths := await visits.choose(min(batch, remaining))):
            remaining -= len(paths)
            leaves = [path[-1] for path in paths]
            is_solution = {leaf: leaf is not root and done(leaf) for leaf in leaves}
            new = [leaf for leaf in leaves if not (is_solution[leaf] and statistics[leaf].visits)]
            values = await costs.of("values", len(new), evaluate_nodes(new, evaluate))
            for leaf, value in zip(new, values, strict=True):
                statistics[leaf].value = value
            tree.count(paths)
            if any(is_solution[leaf] and statistics[leaf].value >= target_value for leaf in leaves):
                break
    except BudgetReached as end:
        stopped = str(end)
    outcome = await collect_outcome(root, done, evaluate, stopped)
    return tree.in_order(outcome, root)


@dataclass(slots=True)
class _Visits:
    """Chooses the paths of visits, and gives nodes children on the way."""

    root: SearchNode
    propose: Propose
    done: Done
    depth: int | None
    priors: Evaluate | None
    state: State
    statistics: TreeStatistics
    costs: Costs
    seen: set[Hashable]

    async def choose(self, max_paths: int) -> list[list[SearchNode]]:
        """Return the paths of the next visits, each to a different node."""
        paths: list[list[SearchNode]] = [[self.root] for _ in range(max_paths)]
        while True:
            ready, chosen = dict[SearchNode, bool](), list[list[SearchNode]]()
            for path in paths:
                is_ready = self._descend(path)
                if path and not (is_ready and path[-1] in ready):
                    further = ready | {path[-1]: is_ready}
                    to_grow = [node for node in further if not further[node]]
                    num_values = len(chosen) + 1
                    if chosen and not self.costs.fits_budget(steps=len(to_grow), values=num_values):
                        break
                    ready = further
                    chosen.append(path)
                    self.statistics.mark([path], 1)
            if all(ready.values()):
                return chosen
            await self._grow([node for node in ready if not ready[node]])
            self.statistics.mark(chosen, -1)
            paths = chosen

    def _is_end(self, path: Sequence[SearchNode]) -> bool:
        is_solution = path[-1] is not self.root and self.done(path[-1])
        return is_solution or (self.depth is not None and len(path) > self.depth)

    def _descend(self, path: list[SearchNode]) -> bool:
        """Extend a path to where a visit ends. False if the node there needs children first."""
        children_of = self.statistics.children
        while path and not self._is_end(path):
            node = path[-1]
            if node is not self.root and not self.statistics.nodes[node].visits:
                return True
            if node not in children_of:
                return False
            if children_of[node]:
                path.append(self.statistics.next(node))
            else:
                path.pop()
                if path and node in children_of[path[-1]]:  # another visit may have pruned it
                    prune([node], self.root, DEAD_END)
                    children_of[path[-1]].remove(node)
        return True

    async def _grow(self, nodes: Sequence[SearchNode]) -> None:
        calls = gather(map(self.propose, nodes))
        proposed = await self.costs.of("steps", len(nodes), calls)
        for node, steps in zip(nodes, proposed, strict=True):
            new = drop_duplicates(steps, self.state, self.seen, self.root)
            self.statistics.children[node] = new
            weights = await make_statistics(new, self.priors)
            self.statistics.nodes.update(zip(new, weights, strict=True))
