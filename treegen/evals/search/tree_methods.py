"""Methods that visit a tree again and again. Their arguments, for `-a`, are those below `on`.

Strategies are imported when they run, so that help answers at once.
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
    """Monte Carlo tree search; see `treegen.search.mcts` and `treegen.search.MCTSRules`."""
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
    """Monte Carlo tree search whose actions are a step and all further steps at once.

    Its solutions are checked by completing their beginnings anew; see `treegen.search.mutual`.
    """
    from treegen.search.propose import combine_proposers
    from treegen.search.strategies.mcts import mcts as search
    from treegen.search.strategies.mutual import mutual

    async def to_the_end(node: "SearchNode") -> "Sequence[SearchNode]":
        return await on.finish(node, 1)

    found = await search(
        on.root,
        combine_proposers(on.propose, to_the_end),
        _choose_evaluator(on),
        on.done,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        batch=batch,
        **get_tree_limits(on),
    )
    return await mutual(found, on.answer, on.finish, checks=checks)


async def ab_mcts(
    on: "MethodContext",
    *,
    rule: Literal["m", "a", "a-beta"] = "m",
    batch: Count = 4,
) -> "SearchOutcome":
    """Adaptive branching over steps; see `treegen.search.ab_mcts`."""
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
    """The evaluation of new states: that of rollouts from them, if the knobs ask for any."""
    from treegen.search.evaluate import rollouts

    num = on.knobs.rollouts
    return rollouts(num, on.done, on.chance) if num else on.chance


def get_tree_limits(on: "MethodContext") -> dict[str, Any]:
    """What trees of all methods have: a depth, and states of which only the first is kept."""
    return {"depth": on.knobs.depth, "state": on.state}
