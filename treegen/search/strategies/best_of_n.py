"""Best of n: draw whole solutions and keep the best one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treegen.common.checks import check_argument_types, check_counts
from treegen.errors import InputError
from treegen.search.budget import BudgetReached
from treegen.search.evaluate import Evaluate
from treegen.search.propose import Step
from treegen.search.strategies.common import Costs, Done, assess, collect_outcome
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def best_of_n(
    root: SearchNode,
    n: int,
    evaluate: Evaluate,
    *,
    play: Step | None = None,
    done: Done | None = None,
    **overrides: Any,
) -> SearchOutcome:
    """Draw n samples and rank them by their values. Every sample is a candidate.

    Under a budget of tokens, samples are drawn in rounds. Each round draws concurrently as many
    samples as are sure to end within the remaining tokens; the first round draws at least one. An
    evaluation may spend the rest.

    Args:
        root: Node to sample from.
        n: Samples to draw.
        evaluate: Gives samples their values.
        play: Draws whole solutions of several steps, such as `Agent.play`. Under a budget, the
            first round draws one, and later rounds as many as fit at the costs so far. Default: one
            sample is a solution.
        done: With `play`, whether a node ends a solution, such as `Agent.done`; others are no
            candidates. Default: all are candidates.
        **overrides: Sampling parameters, as for `SearchNode.sample`; not with `play`.
    """
    check_counts(n=n)
    if play is not None and overrides:
        raise InputError(
            f"{next(iter(overrides))} cannot be used together with play, because play draws "
            f"the samples; remove {next(iter(overrides))}"
        )
    stopped = ""
    try:
        if play is None:
            samples, stopped = await _draw(root, n, overrides)
        else:
            samples = await _play(root, n, play)
        await assess(samples, evaluate)
    except BudgetReached as end:
        stopped = stopped or str(end)
    return await collect_outcome(root, done or (lambda node: True), evaluate, stopped)


async def _draw(
    root: SearchNode, n: int, overrides: dict[str, Any]
) -> tuple[list[SearchNode], str]:
    """Return at most n samples, and why there are fewer.

    Args:
        root: Node to sample from.
        n: Samples to draw.
        overrides: Sampling parameters.
    """
    search, max_tokens = root.search, replace(root.search.params, **overrides).max_tokens
    samples: list[SearchNode] = []
    while len(samples) < n:
        fitting = search.max_fitting_samples(n - len(samples), max_tokens)
        if not fitting and samples:
            return samples, search.budget.describe_limit("tokens")
        samples += await root.sample(max(1, fitting), **overrides)
    return samples, ""


async def _play(root: SearchNode, n: int, play: Step) -> list[SearchNode]:
    """Return the ends of n solutions of several steps.

    Args:
        root: Node to start from.
        n: Solutions to draw.
        play: Draws solutions.
    """
    costs, ends, num = Costs(root.search), list[SearchNode](), 0
    while num < n:
        is_free = num or not costs.is_limited
        size = costs.most(n - num, "episodes") if is_free else 1
        ends += await costs.of("episodes", size, play(root, size))
        num += size
    return ends
