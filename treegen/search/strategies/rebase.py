"""Reward-balanced search (REBASE, Wu et al. 2024): better nodes get more children."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from treegen.common.checks import check_argument_types, check_counts
from treegen.errors import InputError
from treegen.search.evaluate import Evaluate
from treegen.search.event_loop import gather
from treegen.search.propose import Step
from treegen.search.strategies.common import (
    OUTRANKED,
    Done,
    State,
    assess,
    collect_outcome,
    drop_duplicates,
    prune,
    run_until_budget,
    text_state,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

_ROUNDING = 1e-9


@check_argument_types
def allocate(values: Sequence[float], budget: int, temperature: float) -> list[int]:
    """Divide a budget of children among nodes in proportion to exp(value / temperature).

    The best node comes first. Each node gets its share of what is left, rounded up. So the numbers
    add up to the budget, and no node gets more than its exact share rounded up. (The paper rounds
    each share to the nearest whole number, so it draws more or fewer than its budget at some
    levels: four equal nodes get 2 each of a budget of 6, and none of a budget of 1.)

    Args:
        values: Value of each node.
        budget: Children to divide.
        temperature: Above 0; smaller values favour the best nodes more.

    Returns:
        The number of children of each node, in the order of `values`.

    Raises:
        InputError: `temperature` is not above 0.
    """
    if not temperature > 0:
        raise InputError(f"temperature must be more than 0, got {temperature!r}")
    order = sorted(range(len(values)), key=lambda index: -values[index])
    top = max(values, default=0.0)
    weights = [math.exp((value - top) / temperature) for value in values]
    counts = [0] * len(values)
    for position, index in enumerate(order):
        remaining_weight = math.fsum(weights[i] for i in order[position:])
        if not budget or not remaining_weight:
            break
        counts[index] = math.ceil(budget * (weights[index] / remaining_weight) - _ROUNDING)
        budget -= counts[index]
    return counts


@check_argument_types
async def rebase(
    root: SearchNode,
    step: Step,
    evaluate: Evaluate,
    done: Done,
    *,
    width: int,
    depth: int,
    temperature: float = 0.2,
    state: State = text_state,
) -> SearchOutcome:
    """Search level by level, drawing from each node a number of steps that grows with its value.

    Solutions are returned best first. For the paper's vote, in which each solution counts by its
    value, pass the outcome to `vote`.

    Args:
        root: Node to search below.
        step: Draws a given number of next steps of a node (`sample_step`).
        evaluate: Gives nodes their values.
        done: Whether a node ends a solution.
        width: Steps to draw per level, less one for each solution finished at earlier levels.
        depth: Maximum number of steps of a path.
        temperature: Above 0; the smaller it is, the more steps the best nodes get.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(width=width, depth=depth)
    allocate((), 0, temperature)  # This checks the temperature before anything is drawn.

    async def search() -> str:
        num_finished = 0
        seen: set[Hashable] = {state(root)}
        shares = [(root, width)]
        for _ in range(depth):
            groups = await gather(step(node, share) for node, share in shares)
            nodes = drop_duplicates((node for group in groups for node in group), state, seen, root)
            await assess(nodes, evaluate)
            nodes = [node for node in nodes if not node.pruned]
            unfinished = [node for node in nodes if not done(node)]
            num_finished += len(nodes) - len(unfinished)
            values = [node.value for node in unfinished if node.value is not None]
            counts = allocate(values, max(0, width - num_finished), temperature)
            shares = [
                (node, count) for node, count in zip(unfinished, counts, strict=True) if count
            ]
            dropped = [node for node, count in zip(unfinished, counts, strict=True) if not count]
            prune(dropped, root, OUTRANKED)
            if not shares:
                return ""
        return f"depth of {depth} steps reached"

    return await collect_outcome(root, done, evaluate, await run_until_budget(search()))
