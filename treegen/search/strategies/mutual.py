"""Mutual checking (rStar, Qi et al. 2024): completes beginnings again and compares the answers."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from treegen.common.checks import check_argument_types, check_counts
from treegen.errors import InputError
from treegen.prompts.plan.draws import row_seed
from treegen.search.budget import BudgetReached
from treegen.search.event_loop import gather
from treegen.search.external_calls import walk_key_of
from treegen.search.propose import Step
from treegen.search.strategies.majority import Answer
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def mutual(
    found: SearchOutcome,
    answer: Answer,
    complete: Step,
    *,
    checks: int = 1,
    agree: float = 0.5,
    low: float = 0.2,
    high: float = 0.8,
) -> SearchOutcome:
    """Check each candidate of a search by completing its beginning again.

    A solution of d steps is cut after a random number of steps between low * d (rounded up) and
    high * d (rounded down), or after the smaller bound if there is no such number. If the node
    there was dropped, the nearest live node above it is used. The rest is then completed `checks`
    times. A solution is confirmed if at least a share `agree` of the completions have its answer.
    Its score is its value times the share of all solutions with its answer. Confirmed solutions
    come first, then those with higher scores.

    If a budget ends the checks, the solutions confirmed by then stay confirmed.

    Args:
        found: Outcome of any strategy; values from 0 up work best.
        answer: Reads the answer of a solution. Solutions without an answer are not checked and come
            last.
        complete: Completes a node to the end, n times. In the paper another LLM does this; see
            `search_with`.
        checks: Completions per solution.
        agree: Share of completions that must have the solution's answer, from 0 to 1.
        low: Lower bound of the cut, as a share of the solution's steps.
        high: Upper bound of the cut, as a share of the solution's steps.

    Raises:
        InputError: `agree`, `low` and `high` are not shares, or `low` exceeds `high`.
    """
    check_counts(checks=checks)
    if not 0 <= low <= high <= 1:
        raise InputError(
            f"low and high must be between 0 and 1, and low must not exceed high, got {low} "
            f"and {high}"
        )
    if not 0 <= agree <= 1:
        raise InputError(f"agree must be between 0 and 1, got {agree!r}")
    answers = {node: answer(node) for node in found.candidates}
    answered = [node for node in found.candidates if answers[node] is not None]
    share = Counter(answers[node] for node in answered)
    confirmed: set[SearchNode] = set()

    async def check(node: SearchNode) -> None:
        ends = await complete(_choose_cut(node, low, high), checks)
        same = sum(answer(end) == answers[node] for end in ends)
        if ends and same / len(ends) >= agree:
            confirmed.add(node)

    def score(node: SearchNode) -> float:
        return (node.value or 0.0) * share[answers[node]] / len(answered)

    stopped = found.stopped
    try:
        await gather(check(node) for node in answered)
    except BudgetReached as end:
        stopped = stopped or str(end)
    checked = sorted(
        answered, key=lambda node: (node not in confirmed, -score(node), walk_key_of(node))
    )
    ranked = (*checked, *(node for node in found.candidates if answers[node] is None))
    return replace(
        found,
        best=next(iter(ranked), found.best),
        candidates=ranked,
        answers=tuple(answers[node] for node in ranked),
        stopped=stopped,
    )


def _choose_cut(node: SearchNode, low: float, high: float) -> SearchNode:
    """Return the node after which a solution is cut; the draw follows from the search's seed."""
    steps = len(node.path) - 1
    min_steps, max_steps = math.ceil(low * steps), math.floor(high * steps)
    seed = row_seed(node.search.params.seed, node.search.origin_of(node.key), 0)
    cut = (
        random.Random(seed).randint(min_steps, max_steps)
        if min_steps < max_steps
        else min(min_steps, max_steps)
    )
    # A strategy may have dropped pruned nodes, but never the root.
    return next(above for above in node.path[cut::-1] if above.is_live)
