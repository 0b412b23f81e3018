"""Best of n: draw whole solutions, keep the best one."""

from __future__ import annotations

from typing import Any

from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate
from treegen.search.node import SearchNode
from treegen.search.result import Found
from treegen.search.strategy import assess, check_counts, conclude


async def best_of_n(root: SearchNode, n: int, evaluate: Evaluate, **overrides: Any) -> Found:
    """Draw n samples and rank them by what an evaluation makes of them.

    overrides: as for `SearchNode.sample`. Every sample is a candidate.
    """
    check_counts(n=n)
    stopped = ""
    try:
        await assess(await root.sample(n, **overrides), evaluate)
    except BudgetReached as end:
        stopped = str(end)
    return await conclude(root, lambda node: True, evaluate, stopped)
