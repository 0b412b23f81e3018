"""Beam search over steps, and diverse verifier tree search."""

from __future__ import annotations

from treegen.common.checks import check_argument_types, check_counts
from treegen.search.evaluate import Evaluate
from treegen.search.event_loop import gather
from treegen.search.propose import Propose
from treegen.search.strategies.common import (
    OUTRANKED,
    Done,
    State,
    assess,
    collect_outcome,
    drop_duplicates,
    propose_all,
    prune,
    rank,
    run_until_budget,
    text_state,
)
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


@check_argument_types
async def beam(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    width: int,
    depth: int,
    state: State = text_state,
) -> SearchOutcome:
    """Extend all paths by one step, keep the best ones, and repeat.

    Solutions are returned best first. For a vote weighted by their values, pass the outcome to
    `vote`.

    Args:
        root: Node to search below.
        propose: Makes the next steps of a node.
        evaluate: Gives nodes their values.
        done: Whether a node ends a solution.
        width: Paths to keep, finished ones included. So a search finds at most `width` solutions.
        depth: Maximum number of steps of a path.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(width=width, depth=depth)
    stopped = await run_until_budget(
        _beam_down(root, propose, evaluate, done, width=width, depth=depth, state=state)
    )
    return await collect_outcome(root, done, evaluate, stopped)


async def _beam_down(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    width: int,
    depth: int,
    state: State,
) -> str:
    """Grow the tree below root as `beam` does, and return why it stopped early ("" if it did not).

    Args:
        root: Node to search below.
        propose: Makes the next steps of a node.
        evaluate: Gives nodes their values.
        done: Whether a node ends a solution.
        width: Paths to keep, finished ones included.
        depth: Maximum number of steps of a path.
        state: Returns the state of a node.
    """
    frontier, seen, num_finished = [root], {state(root)}, 0
    for _ in range(depth):
        steps = drop_duplicates(await propose_all(frontier, propose), state, seen, root)
        await assess(steps, evaluate)
        ranked = rank(steps)
        num_free = width - num_finished
        prune(ranked[num_free:], root, OUTRANKED)
        frontier = [node for node in ranked[:num_free] if not done(node)]
        num_finished += len(ranked[:num_free]) - len(frontier)
        if not frontier:
            return ""
    return f"depth of {depth} steps reached"


@check_argument_types
async def dvts(
    root: SearchNode,
    propose: Propose,
    evaluate: Evaluate,
    done: Done,
    *,
    subtrees: int,
    depth: int,
    state: State = text_state,
) -> SearchOutcome:
    """Grow independent subtrees, each of which follows the best of its proposed steps.

    Unlike in a beam, one good start does not displace the others. Each subtree proposes first steps
    of its own, so `propose` must sample (`sample_steps`).

    There is at most one solution per subtree, and the best comes first. For a vote weighted by
    values, as in the paper, pass the outcome to `vote`.

    Args:
        root: Node to search below.
        propose: Makes the next steps of a node.
        evaluate: Gives nodes their values.
        done: Whether a node ends a solution.
        subtrees: Number of subtrees.
        depth: Maximum number of steps of a path.
        state: Returns the state of a node. Of several nodes with equal states only the first is
            kept.
    """
    check_counts(subtrees=subtrees, depth=depth)

    async def search() -> str:
        reasons = await gather(
            _beam_down(root, propose, evaluate, done, width=1, depth=depth, state=state)
            for _ in range(subtrees)
        )
        return next(filter(None, reasons), "")

    return await collect_outcome(root, done, evaluate, await run_until_budget(search()))
