"""Tree of thoughts (Yao et al. 2023): breadth first, depth first, and the best node first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable

from treegen.common.checks import check_argument_types, check_counts
from treegen.search.evaluate import Evaluate
from treegen.search.external_calls import walk_key_of
from treegen.search.propose import Propose
from treegen.search.strategies.common import (
    DEAD_END,
    OUTRANKED,
    TOO_DEEP,
    TOO_LOW,
    Done,
    State,
    assess,
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
            unfinished = [node for node in good if not done(node)]
            num_finished += len(good) - len(unfinished)
            prune(bad, root, TOO_LOW)
            prune(unfinished[breadth:], root, OUTRANKED)
            frontier = unfinished[:breadth]
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


@check_argument_types
async def best_first(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    max_expansions: int | None = None,
    batch: int = 1,
    prune_below: float = -math.inf,
    solutions: int | None = 1,
    state: State = text_state,
) -> SearchOutcome:
    """Expand nodes in the order of their values, whatever their depth.

    Args:
        root: Node to search below.
        propose: Makes the next steps of a node.
        evaluate: Gives nodes their values.
        done: Whether a node ends a solution.
        max_expansions: Maximum number of nodes to propose next steps for; None is no limit.
        batch: Nodes to expand concurrently.
        prune_below: Nodes with a lower value are pruned.
        solutions: Number of finished solutions that ends the search. A solution is finished when it
            is done and no open node is better. None continues until no node is open.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(max_expansions=max_expansions, batch=batch, solutions=solutions)

    async def search() -> str:
        seen: set[Hashable] = {state(root)}
        # Keys are unique, so the heap never compares nodes themselves.
        opened = [(-math.inf, walk_key_of(root), root)]
        stopped, num_expansions, num_finished = "", 0, 0
        while opened and num_finished != solutions and not stopped:
            chosen: list[SearchNode] = []
            while opened and len(chosen) < batch and num_finished != solutions:
                node = opened[0][2]
                finished = node is not root and done(node)
                if finished and chosen:
                    break  # expand the chosen nodes first, because they are better
                heapq.heappop(opened)
                if finished:
                    num_finished += 1
                else:
                    chosen.append(node)
            if max_expansions is not None and num_expansions + len(chosen) > max_expansions:
                chosen = chosen[: max_expansions - num_expansions]
                stopped = f"limit of {max_expansions} expansions reached"
            num_expansions += len(chosen)
            steps = drop_duplicates(await propose_all(chosen, propose), state, seen, root)
            await assess(steps, evaluate)
            good, bad = split(steps, prune_below)
            prune(bad, root, TOO_LOW)
            ends = [node for node in chosen if not node.children and node is not root]
            prune(ends, root, DEAD_END)
            for node in good:
                heapq.heappush(opened, (-(node.value or 0.0), walk_key_of(node), node))
        return stopped

    return await collect_outcome(root, done, evaluate, await run_until_budget(search()))
