"""Declared expansions: generate the levels of a tree without user code in the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.prompts.expansion import Expand, ScorerName
from treegen.search.evaluate import Evaluate, mean_logprob, min_logprob, sum_logprob
from treegen.search.external_calls import walk_key_of
from treegen.search.propose import Propose
from treegen.search.strategies.common import (
    OUTRANKED,
    assess,
    collect_outcome,
    propose_all,
    prune,
    rank,
    run_until_budget,
)
from treegen.search.tree.node import SearchNode, is_ended
from treegen.search.tree.result import SearchOutcome

_SCORERS: Final[dict[ScorerName, Evaluate]] = {
    "mean_logprob": mean_logprob,
    "min_logprob": min_logprob,
    "sum_logprob": sum_logprob,
}


@check_argument_types
async def expand(root: SearchNode, levels: Sequence[Expand]) -> SearchOutcome:
    """Generate declared levels below a node.

    Candidates are the nodes kept at the last level, and nodes of earlier levels at which the model
    ended the text. They are ranked by the last level's scorer (`mean_logprob` by default).

    Args:
        root: Node to expand.
        levels: Declarations of the levels, from the top down.

    Raises:
        InputError: `levels` is empty.
    """
    if not levels:
        raise InputError("levels must not be empty; pass at least one Expand")

    def done(node: SearchNode) -> bool:
        generated = sum(step.completion is not None for step in node.path[root.depth + 1 :])
        return generated == len(levels) or is_ended(node)

    async def search() -> str:
        frontier = [root]
        for level in levels:
            candidates = await propose_all(frontier, _propose_level(level))
            if level.keep is not None or level.scorer is not None:
                await assess(candidates, _get_scorer(level))
                candidates = rank(candidates)
            best = candidates[: level.keep]
            prune(candidates[len(best) :], root, OUTRANKED)
            frontier = sorted((node for node in best if not is_ended(node)), key=walk_key_of)
        return ""

    stopped = await run_until_budget(search())
    return await collect_outcome(root, done, _get_scorer(levels[-1]), stopped)


def _get_scorer(level: Expand) -> Evaluate:
    if level.scorer is None:
        return mean_logprob
    return _SCORERS[level.scorer] if isinstance(level.scorer, str) else level.scorer


def _propose_level(level: Expand) -> Propose:
    async def propose(node: SearchNode) -> list[SearchNode]:
        above = node.extend(level.prefix) if level.prefix else node
        return await above.sample(level.samples, **level.overrides)

    return propose
