"""Best of n: draw whole solutions and keep the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treegen.common.checks import check_argument_types
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate
from treegen.search.strategies.common import assess, check_counts, collect_outcome
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def best_of_n(
    root: SearchNode, n: int, evaluate: Evaluate, **overrides: Any
) -> SearchOutcome:
    """Draw n samples and rank them by their values. Every sample is a candidate.

    Under a budget of tokens, samples are drawn in rounds. Each round draws concurrently as many
    samples as are sure to end within the remaining tokens; the first round draws at least one. An
    evaluation may spend the rest.

    Args:
        root: Node to sample from.
        n: Samples to draw.
        evaluate: Gives samples their values.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """
    check_counts(n=n)
    search, max_tokens = root.search, replace(root.search.params, **overrides).max_tokens
    stopped = ""
    try:
        samples: list[SearchNode] = []
        while len(samples) < n:
            fitting = search.max_fitting_samples(n - len(samples), max_tokens)
            if not fitting and samples:
                stopped = search.budget.describe_limit("tokens")
                break
            samples += await root.sample(max(1, fitting), **overrides)
        await assess(samples, evaluate)
    except BudgetReached as end:
        stopped = stopped or str(end)
    return await collect_outcome(root, lambda node: True, evaluate, stopped)
