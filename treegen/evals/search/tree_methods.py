"""Methods that visit a tree again and again. Their arguments, for `-a`, are those below `on`.

Strategies are imported when they run, so that help answers at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from treegen.evals.search.typed import Count

if TYPE_CHECKING:
    from treegen.evals.search.tools import Tools
    from treegen.search.evaluate import Evaluate
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import Found


async def mcts(
    on: "Tools",
    *,
    batch: Count = 8,
    virtual: Literal["loss", "visit"] = "loss",
    reward: Literal["leaf", "mean", "sum", "min", "product"] = "leaf",
    backup: Literal["mean", "max"] = "mean",
    output: Literal["value", "reward", "visits", "mean"] = "value",
    priors: Literal["none", "likelihood"] = "none",
) -> "Found":
    """Monte Carlo tree search; see `treegen.search.mcts` and `treegen.search.Rules`."""
    from treegen.search.strategies.arms import Rules, likelihood
    from treegen.search.strategies.mcts import mcts as search

    return await search(
        on.root,
        on.propose,
        _played(on),
        on.done,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        batch=batch,
        rules=Rules(virtual, reward, backup, output),
        priors=likelihood if priors == "likelihood" else None,
        **limits(on),
    )


async def rstar(on: "Tools", *, batch: Count = 8, checks: Count = 4) -> "Found":
    """Monte Carlo tree search whose actions are a step and all further steps at once.

    Its solutions are checked by completing their beginnings anew; see `treegen.search.mutual`.
    """
    from treegen.search.propose import either
    from treegen.search.strategies.mcts import mcts as search
    from treegen.search.strategies.mutual import mutual

    async def to_the_end(node: "SearchNode") -> "Sequence[SearchNode]":
        return await on.finish(node, 1)

    found = await search(
        on.root,
        either(on.propose, to_the_end),
        _played(on),
        on.done,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        batch=batch,
        **limits(on),
    )
    return await mutual(found, on.answer, on.finish, checks=checks)


async def ab_mcts(
    on: "Tools",
    *,
    rule: Literal["m", "a", "a-beta"] = "m",
    batch: Count = 4,
) -> "Found":
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
        **limits(on),
    )


def _played(on: "Tools") -> "Evaluate":
    """The evaluation of new states: that of rollouts from them, if the knobs ask for any."""
    from treegen.search.evaluate import rollouts

    num = on.knobs.rollouts
    return rollouts(num, on.done, on.chance) if num else on.chance


def limits(on: "Tools") -> dict[str, Any]:
    """What trees of all methods have: a depth, and states of which only the first is kept."""
    return {"depth": on.knobs.depth, "state": on.state}
