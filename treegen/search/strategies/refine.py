"""Self-Refine (Madaan et al. 2023): an attempt, feedback on it, and a better attempt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from treegen.common.checks import check_argument_types, check_counts
from treegen.search.budget import BudgetReached
from treegen.search.event_loop import gather
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome

Continue = Callable[[SearchNode], Awaitable[SearchNode]]
"""Makes one node below another, such as an attempt or feedback on an attempt."""


@check_argument_types
def answer_after(text: str, **overrides: Any) -> Continue:
    """Append a text, such as a request for feedback, and draw one answer to it.

    Args:
        text: Text to append; "" appends nothing.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
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
    """Alternate attempts and feedback until the feedback says that an attempt is good enough.

    Each attempt or feedback is a node below the previous one. So a refinement reads all earlier
    attempts and feedback, as in the paper, and nothing is computed twice. A node's `text` is the
    attempt alone; its `path_text` also has what came before.

    Candidates are the last attempt of each chain, then the attempts before the last.

    Args:
        root: Node to search below.
        generate: Makes the first attempt below the root.
        feedback: Makes feedback below an attempt.
        refine: Makes an attempt below feedback.
        enough: Whether feedback says that its attempt needs no refinement.
        rounds: Maximum number of refinements.
        chains: Number of independent chains to follow concurrently.
    """
    check_counts(rounds=rounds, chains=chains)
    attempts: list[list[SearchNode]] = [[] for _ in range(chains)]

    async def follow(chain: list[SearchNode]) -> None:
        chain.append(await generate(root))
        for _ in range(rounds):
            comment = await feedback(chain[-1])
            if enough(comment):
                break
            chain.append(await refine(comment))

    stopped = ""
    try:
        await gather(follow(chain) for chain in attempts)
    except BudgetReached as end:
        stopped = str(end)
    longest = max(map(len, attempts))
    candidates = [
        chain[-back] for back in range(1, longest + 1) for chain in attempts if len(chain) >= back
    ]
    return SearchOutcome(next(iter(candidates), None), tuple(candidates), stopped=stopped)
