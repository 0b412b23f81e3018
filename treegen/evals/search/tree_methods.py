"""Methods that visit a tree repeatedly. Their parameters after `on` are the arguments of `-a`.

Strategies are imported when they run, so that help is fast.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from treegen.evals.search.method_arguments import Count

if TYPE_CHECKING:
    from treegen.evals.search.method_types import MethodContext
    from treegen.search.evaluate import Evaluate
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import SearchOutcome


async def mcts(
    on: "MethodContext",
    *,
    batch: Count = 8,
    virtual: Literal["loss", "visit"] = "loss",
    reward: Literal["leaf", "mean", "sum", "min", "product"] = "leaf",
    backup: Literal["mean", "max"] = "mean",
    output: Literal["value", "reward", "visits", "mean"] = "value",
    priors: Literal["none", "likelihood"] = "none",
) -> "SearchOutcome":
    """Search by Monte Carlo tree search; see `treegen.search.mcts` and `treegen.search.MCTSRules`.

    Args:
        on: The problem and its functions.
        batch: Visits to the tree per batch.
        virtual: What a visit in progress counts as; see `MCTSRules`.
        reward: What a visit counts for each node of its path; see `MCTSRules`.
        backup: Whether a node's value is the mean or the maximum of its visits.
        output: How the first solution is chosen; see `MCTSRules`.
        priors: Prior probabilities of children: none, or by their likelihood.
    """
    from treegen.search.strategies.mcts import mcts as search
    from treegen.search.strategies.node_statistics import MCTSRules, likelihood_priors

    return await search(
        on.root,
        on.propose,
        _choose_evaluator(on),
        on.done,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        batch=batch,
        rules=MCTSRules(virtual, reward, backup, output),
        priors=likelihood_priors if priors == "likelihood" else None,
        **get_tree_limits(on),
    )


async def rstar(on: "MethodContext", *, batch: Count = 8, checks: Count = 4) -> "SearchOutcome":
    """Search by Monte Carlo tree search with two actions: one step, or all remaining steps at once.

    Solutions are checked by completing their beginnings again; see `treegen.search.mutual`.

    Args:
        on: The problem and its functions.
        batch: Visits to the tree per batch.
        checks: The number of completions that check each solution.
    """
    from treegen.search.propose import combine_proposers
    from treegen.search.strategies.mcts import mcts as search
    from treegen.search.strategies.mutual import mutual

    async def to_the_end(node: "SearchNode") -> "Sequence[SearchNode]":
        return await on.finish(node, 1)

    outcome = await search(
        on.root,
        combine_proposers(on.propose, to_the_end),
        _choose_evaluator(on),
        on.done,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        batch=batch,
        **get_tree_limits(on),
    )
    return await mutual(outcome, on.answer, on.finish, checks=checks)


async def ab_mcts(
    on: "MethodContext", *, rule: Literal["m", "a", "a-beta"] = "m", batch: Count = 4
) -> "SearchOutcome":
    """Search by adaptive branching over steps; see `treegen.search.ab_mcts`.

    Args:
        on: The problem and its functions.
        rule: The rule that chooses between a new child and an existing one; see `ab_mcts`.
        batch: Visits to the tree per batch.
    """
    from treegen.search.strategies.ab_mcts import ab_mcts as search

    return await search(
        on.root,
        on.step,
        on.chance,
        on.done,
        iterations=on.knobs.iterations,
        rule=rule,
        batch=batch,
        **get_tree_limits(on),
    )


def _choose_evaluator(on: "MethodContext") -> "Evaluate":
    """Return the evaluation of new states: by rollouts from them, if the knobs request any."""
    from treegen.search.evaluate import rollouts

    num = on.knobs.rollouts
    return rollouts(num, on.done, on.chance) if num else on.chance


def get_tree_limits(on: "MethodContext") -> dict[str, Any]:
    """Return the limits of every method's tree: a depth, and that equal states are kept once."""
    return {"depth": on.knobs.depth, "state": on.state}
