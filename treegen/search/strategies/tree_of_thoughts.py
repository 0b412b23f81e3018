"""Tree of thoughts (Yao et al. 2023): breadth first, and depth first with backtracking."""

from __future__ import annotations

import math
from collections.abc import Hashable

from treegen.common.checks import check_argument_types
from treegen.search.evaluate import Evaluate
from treegen.search.propose import Propose
from treegen.search.strategies.common import (
    DEAD_END,
    OUTRANKED,
    TOO_DEEP,
    TOO_LOW,
    Done,
    State,
    assess,
    check_counts,
    collect_outcome,
    drop_duplicates,
    propose_all,
    prune,
    run_until_budget,
    split,
    text_state,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def bfs(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    breadth: int,
    depth: int,
    prune_below: float = -math.inf,
    solutions: int | None = 1,
    state: State = text_state,
) -> SearchOutcome:
    """Search level by level, keeping the best thoughts of each.

    Args:
        root: Node to search below.
        propose: Makes the next thoughts of a node.
        evaluate: Gives thoughts their values.
        done: Whether a node ends a solution.
        breadth: Thoughts of a level to continue from, finished ones not counted.
        depth: Maximum number of levels.
        prune_below: Thoughts with a lower value are pruned, finished or not.
        solutions: The search ends after the level at which this many solutions are finished; None
            continues for `depth` levels.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(breadth=breadth, depth=depth, solutions=solutions)

    async def search() -> str:
        frontier, seen, num_finished = [root], {state(root)}, 0
        for _ in range(depth):
            thoughts = drop_duplicates(await propose_all(frontier, propose), state, seen, root)
            await assess(thoughts, evaluate)
            good, bad = split(thoughts, prune_below)
            going = [node for node in good if not done(node)]
            num_finished += len(good) - len(going)
            prune(bad, root, TOO_LOW)
            prune(going[breadth:], root, OUTRANKED)
            frontier = going[:breadth]
            if not frontier or (solutions is not None and num_finished >= solutions):
                return ""
        return f"depth of {depth} steps reached"

    return await collect_outcome(root, done, evaluate, await run_until_budget(search()))


@check_argument_types
async def dfs(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    depth: int,
    prune_below: float = -math.inf,
    max_visits: int | None = None,
    solutions: int | None = 1,
    state: State = text_state,
) -> SearchOutcome:
    """Follow the best thought first, and backtrack from dead ends.

    Args:
        root: Node to search below.
        propose: Makes the next thoughts of a node.
        evaluate: Gives thoughts their values.
        done: Whether a node ends a solution.
        depth: Maximum number of steps of a path.
        prune_below: Thoughts with a lower value are pruned and not visited.
        max_visits: Maximum number of nodes to propose next steps for; None is no limit.
        solutions: The search ends when this many solutions are finished; None visits everything.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(depth=depth, max_visits=max_visits, solutions=solutions)

    async def search() -> str:
        num_visits = num_finished = 0
        seen: set[Hashable] = {state(root)}
        stack = [(root, 0)]
        while stack:
            node, steps = stack.pop()
            if node is not root and done(node):
                num_finished += 1
                if num_finished == solutions:
                    return ""
                continue
            if steps == depth:
                prune([node], root, TOO_DEEP)
                continue
            if num_visits == max_visits:
                return f"limit of {max_visits} visits reached"
            num_visits += 1
            thoughts = drop_duplicates(await propose(node), state, seen, root)
            await assess(thoughts, evaluate)
            good, bad = split(thoughts, prune_below)
            prune(bad, root, TOO_LOW)
            if not good and node is not root:
                prune([node], root, DEAD_END)
            stack += [(thought, steps + 1) for thought in reversed(good)]
        return ""

    return await collect_outcome(root, done, evaluate, await run_until_budget(search()))
