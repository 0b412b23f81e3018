"""Mutual checking (rStar, Qi et al. 2024): does the beginning lead others to the same answer?"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.prompts.plan.seeds import row_seed
from treegen.search.budget import BudgetReached
from treegen.search.event_loop import gather
from treegen.search.external_calls import place_of
from treegen.search.propose import Step
from treegen.search.strategies.common import check_counts
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
    """Check each solution that was found by completing its beginning anew.

    A solution of d steps is cut after a number of steps that is drawn from low * d (rounded up) to
    high * d (rounded down), or after the smaller of them; or before that, where it is still live.
    What is left is completed `checks` times. If at least a share `agree` of the completions has the
    solution's answer, it is confirmed. Its score is its value times the share of all solutions that
    have its answer. Confirmed solutions come first, and then the higher scores.

    A budget that ends the checks leaves what is confirmed by then.

    Args:
        found: What any strategy returned; best with the values of a search from 0 on.
        answer: Reads the answer of a solution; those without one are not checked and come last.
        complete: Completes a node to the end, n times. The paper has another LLM do it; see
            `search_with`.
    """
    check_counts(checks=checks)
    if not 0 <= low <= high <= 1:
        raise InputError(f"low and high must be shares, the lower one first, got {low} and {high}")
    answers = {node: answer(node) for node in found.candidates}
    given = [node for node in found.candidates if answers[node] is not None]
    share = Counter(answers[node] for node in given)
    confirmed: set[SearchNode] = set()

    async def check(node: SearchNode) -> None:
        ends = await complete(_beginning(node, low, high), checks)
        same = sum(answer(end) == answers[node] for end in ends)
        if ends and same >= agree * len(ends):
            confirmed.add(node)

    def score(node: SearchNode) -> float:
        return (node.value or 0.0) * share[answers[node]] / len(given)

    stopped = found.stopped
    try:
        await gather(check(node) for node in given)
    except BudgetReached as end:
        stopped = stopped or str(end)
    checked = sorted(given, key=lambda node: (node not in confirmed, -score(node), place_of(node)))
    ranked = (*checked, *(node for node in found.candidates if answers[node] is None))
    return replace(
        found,
        best=next(iter(ranked), found.best),
        candidates=ranked,
        answers=tuple(answers[node] for node in ranked),
        stopped=stopped,
    )


def _beginning(node: SearchNode, low: float, high: float) -> SearchNode:
    """The node that a solution is cut after; what is drawn follows from the search's seed."""
    steps = len(node.path) - 1
    least, most = math.ceil(low * steps), math.floor(high * steps)
    seed = row_seed(node.search.params.seed, node.search.origin_of(node.key), 0)
    cut = random.Random(seed).randint(least, most) if least < most else min(least, most)
    # What a strategy has given up is gone; the root is not.
    return next(each for each in node.path[cut::-1] if each.is_live)
