"""Self-Refine (Madaan et al. 2023): attempts, feedback on each, and better attempts after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from treegen.common.checks import check_argument_types
from treegen.search.budget import BudgetReached
from treegen.search.event_loop import gather
from treegen.search.strategies.common import check_counts
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Continue = Callable[[SearchNode], Awaitable[SearchNode]]
"""Makes one node below another, such as an attempt, or feedback on one."""


@check_argument_types
def answer_after(text: str, **overrides: Any) -> Continue:
    """Append a text, such as a request for feedback, and draw one answer to it.

    Args:
        overrides: As for `SearchNode.sample`.
    """

    async def ask(node: SearchNode) -> SearchNode:
        (answer,) = await (node.extend(text) if text else node).sample(1, **overrides)
        return answer

    return ask


@check_argument_types
async def self_refine(
    root: SearchNode,
    generate: Continue,
    feedback: Continue,
    refine: Continue,
    enough: Callable[[SearchNode], bool],
    *,
    rounds: int,
    chains: int = 1,
) -> SearchOutcome:
    """Attempt, ask for feedback, attempt again after it, until the feedback says it is enough.

    Each is a node below the one before. So what refines an attempt reads all attempts and all
    feedback before it, as in the paper, and nothing is computed twice. The answer of an attempt is
    in the node's own `text`; its `path_text` also has what was before.

    The last attempt of each chain comes first, then those before the last.

    Args:
        generate: Makes the first attempt below the root.
        feedback: Makes the feedback below an attempt.
        refine: Makes an attempt below feedback.
        enough: Whether feedback says that its attempt needs no other.
        rounds: Most times to refine.
        chains: How many to follow side by side.
    """
    check_counts(rounds=rounds, chains=chains)
    attempts: list[list[SearchNode]] = [[] for _ in range(chains)]

    async def follow(own: list[SearchNode]) -> None:
        own.append(await generate(root))
        for _ in range(rounds):
            told = await feedback(own[-1])
            if enough(told):
                break
            own.append(await refine(told))

    stopped = ""
    try:
        await gather(follow(own) for own in attempts)
    except BudgetReached as end:
        stopped = str(end)
    longest = max(map(len, attempts))
    candidates = [
        own[-back] for back in range(1, longest + 1) for own in attempts if len(own) >= back
    ]
    return SearchOutcome(next(iter(candidates), None), tuple(candidates), stopped=stopped)
