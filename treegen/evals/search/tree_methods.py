"""Methods with arguments of their own: their parameters after `on` are the arguments of `-a`.

Strategies are imported when they run, so that help is fast.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from treegen.errors import InputError
from treegen.evals.config.type_checks import Maximum, Minimum
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


async def lats(
    on: "MethodContext",
    *,
    weight: Annotated[float, Minimum(0), Maximum(1)] = 0.5,
    lessons: Count = 4,
    reflect: str = "The task is not solved yet. In one or two sentences, say what went wrong and "
    "what to do instead.",
    judge: str = "How likely do these steps lead to a solution? Answer with a number from 0 to 10.",
) -> "SearchOutcome":
    """Search by language agent tree search; see `treegen.search.lats`.

    The value of a new state is weight * (the model's judgement) + (1 - weight) * (the share of its
    siblings with the same actions), as in the paper. The reward of an end is that of `evaluate`.

    Args:
        on: The problem and its functions.
        weight: Weight of the model's judgement, from 0 to 1; with 0, the model is not asked.
        lessons: The number of lessons of failures that later steps get.
        reflect: The instruction that asks for the lesson of a failure.
        judge: The instruction that asks for a judgement.
    """
    from treegen.search.event_loop import gather
    from treegen.search.strategies.lats import lats as search

    known: dict[SearchNode, Sequence[str]] = {}
    shares: dict[SearchNode, float] = {}

    async def propose(node: "SearchNode", lessons: "Sequence[str]") -> "Sequence[SearchNode]":
        new = [lesson for lesson in lessons if lesson not in known.get(node, ())]
        start = node
        if new and not on.done(node):
            start = on.instruct(node, "\n".join(["Lessons of earlier attempts:", *new]))
        children = await on.propose(start)
        counts = Counter(map(on.state, children))
        for child in children:
            known[child] = [*known.get(node, ()), *new]
            shares[child] = counts[on.state(child)] / len(children)
        return children

    async def evaluate(nodes: "Sequence[SearchNode]", lessons: "Sequence[str]") -> list[float]:
        values = [(1 - weight) * shares[node] for node in nodes]
        if weight:
            answers = await gather(on.ask(node, judge, 32) for node in nodes)
            for place, answer in enumerate(answers):
                values[place] += weight * _read_score(answer)
        return values

    async def learn(end: "SearchNode", reward: float) -> str:
        return " ".join((await on.ask(end, reflect, 200)).split())

    return await search(
        on.root,
        propose,
        evaluate,
        on.done,
        on.chance,
        learn,
        iterations=on.knobs.iterations,
        c=on.knobs.exploration,
        num_lessons=lessons,
        **get_tree_limits(on),
    )


def _read_score(answer: str) -> float:
    """Return the first number of an answer, from 0 to 10, as a value from 0 to 1; 0.5 without."""
    number = re.search(r"[0-9]{1,4}([.][0-9]{1,4})?", answer)
    return min(float(number[0]) / 10, 1.0) if number else 0.5


def _choose_evaluator(on: "MethodContext") -> "Evaluate":
    """Return the evaluation of new states: by rollouts from them, if the knobs request any."""
    from treegen.search.evaluate import rollouts

    num = on.knobs.rollouts
    play = on.finish if on.acts else None
    return rollouts(num, on.done, on.chance, play=play) if num else on.chance


def get_tree_limits(on: "MethodContext") -> dict[str, Any]:
    """Return the limits of every method's tree: a depth, and that equal states are kept once."""
    return {"depth": on.knobs.depth, "state": on.state}
