"""Methods with arguments of their own: their parameters after `on` are the arguments of `-a`.

Strategies are imported when they run, so that help is fast.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from treegen.errors import InputError
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


async def self_refine(
    on: "MethodContext",
    *,
    rounds: Count = 3,
    chains: Count = 1,
    feedback: str = "Check this answer step by step. If nothing is wrong with it, write DONE.",
    refine: str = "Write the whole answer again, improved by this feedback.",
    enough: str = "DONE",
) -> "SearchOutcome":
    """Refine an answer by feedback on it; see `treegen.search.self_refine`.

    Args:
        on: The problem and its functions.
        rounds: Maximum number of refinements of an answer.
        chains: Number of answers to refine independently.
        feedback: The instruction that asks for feedback.
        refine: The instruction that asks for a better answer.
        enough: Text by which feedback says that the answer needs no refinement.

    Raises:
        InputError: `enough` is empty.
    """
    from treegen.search.strategies.refine import self_refine as search

    if not enough:
        raise InputError('enough must not be empty; give the word that ends feedback, as "DONE"')

    solved: set[SearchNode] = set()

    async def continue_node(node: "SearchNode") -> "SearchNode":
        (answer,) = await node.sample(1)
        return answer

    async def comment(attempt: "SearchNode") -> "SearchNode":
        if on.is_solved(attempt):
            solved.add(attempt)
            return attempt
        return await continue_node(on.instruct(attempt, feedback))

    async def improve(criticism: "SearchNode") -> "SearchNode":
        return await continue_node(on.instruct(criticism, refine))

    return await search(
        on.root,
        continue_node,
        comment,
        improve,
        lambda node: node in solved or enough in node.text,
        rounds=rounds,
        chains=chains,
    )


def _choose_evaluator(on: "MethodContext") -> "Evaluate":
    """Return the evaluation of new states: by rollouts from them, if the knobs request any."""
    from treegen.search.evaluate import rollouts

    num = on.knobs.rollouts
    play = on.finish if on.acts else None
    return rollouts(num, on.done, on.chance, play=play) if num else on.chance


def get_tree_limits(on: "MethodContext") -> dict[str, Any]:
    """Return the limits of every method's tree: a depth, and that equal states are kept once."""
    return {"depth": on.knobs.depth, "state": on.state}
