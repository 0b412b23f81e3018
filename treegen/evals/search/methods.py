"""The methods of `treegen search`: their names, their strategies, and the settings they read.

METHODS lists all methods. Help texts, checks and searches read METHODS, and nothing else names
methods. Strategies are imported when they run, so that help is fast. Users set the parameters of a
method after `on` with `-a`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from treegen.errors import InputError
from treegen.evals.config.type_checks import Maximum, Minimum
from treegen.evals.search.method_types import Count, Method, MethodContext, read_signature

if TYPE_CHECKING:
    from treegen.search.evaluate import Evaluate
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.records import SearchTree
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
        iterations=on.settings.iterations,
        c=on.settings.exploration,
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
        iterations=on.settings.iterations,
        c=on.settings.exploration,
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
        iterations=on.settings.iterations,
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
        raise InputError(
            'enough must not be empty; give the word that ends feedback, such as "DONE"'
        )

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

    lessons_of: dict[SearchNode, Sequence[str]] = {}
    shares: dict[SearchNode, float] = {}

    async def propose(node: "SearchNode", lessons: "Sequence[str]") -> "Sequence[SearchNode]":
        new = [lesson for lesson in lessons if lesson not in lessons_of.get(node, ())]
        start = node
        if new and not on.done(node):
            start = on.instruct(node, "\n".join(["Lessons of earlier attempts:", *new]))
        children = await on.propose(start)
        counts = Counter(map(on.state, children))
        for child in children:
            lessons_of[child] = [*lessons_of.get(node, ()), *new]
            shares[child] = counts[on.state(child)] / len(children)
        return children

    async def evaluate(nodes: "Sequence[SearchNode]", lessons: "Sequence[str]") -> list[float]:
        values = [(1 - weight) * shares[node] for node in nodes]
        if weight:
            answers = await gather(on.ask(node, judge, 32) for node in nodes)
            for index, answer in enumerate(answers):
                values[index] += weight * _read_score(answer)
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
        iterations=on.settings.iterations,
        c=on.settings.exploration,
        num_lessons=lessons,
        **get_tree_limits(on),
    )


def _read_score(answer: str) -> float:
    """Return the first number of an answer, from 0 to 10, as a value from 0 to 1; 0.5 without."""
    number = re.search(r"[0-9]{1,4}([.][0-9]{1,4})?", answer)
    return min(float(number[0]) / 10, 1.0) if number else 0.5


def _choose_evaluator(on: "MethodContext") -> "Evaluate":
    """Return the evaluation of new states: by rollouts from them, if the settings request any."""
    from treegen.search.evaluate import rollouts

    num = on.settings.rollouts
    play = on.finish if on.is_agent else None
    return rollouts(num, on.done, on.chance, play=play) if num else on.chance


def get_tree_limits(on: "MethodContext") -> dict[str, Any]:
    """Return the limits of every method's tree: a depth, and that equal states are kept once."""
    return {"depth": on.settings.depth, "state": on.state}


async def _sample(on: MethodContext) -> "SearchOutcome":
    """Draw one solution; if the task can check solutions, draw up to `width` at once."""
    from treegen.search.budget import BudgetReached
    from treegen.search.strategies.best_of_n import best_of_n
    from treegen.search.tree.result import SearchOutcome

    if on.is_agent:
        return await best_of_n(on.root, 1, on.evaluate, play=on.finish)
    if not on.checkable:
        (only,) = await on.root.sample(1)
        return SearchOutcome(only, (only,))
    params = on.root.search.params
    try:
        max_samples = on.settings.width if params.temperature else 1
        fitting = on.root.search.max_fitting_samples(max_samples, params.max_tokens)
        samples = await on.root.sample(max(1, fitting))
    except BudgetReached as end:
        return SearchOutcome(None, stopped=str(end))
    return SearchOutcome(None, tuple(samples))


async def _best_of_n(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.best_of_n import best_of_n

    play = on.finish if on.is_agent else None
    return await best_of_n(on.root, on.settings.num_samples, on.evaluate, play=play)


async def _majority(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.majority import majority

    max_samples, batch = on.settings.num_samples, on.settings.width
    return await majority(on.root, on.answer, max_samples=max_samples, batch=batch)


async def _search_tree(on: MethodContext, strategy: str, **options: Any) -> "SearchOutcome":
    """Search by a strategy that proposes and evaluates steps.

    Args:
        on: The problem and its functions.
        strategy: The place of the strategy below `treegen.search.strategies`.
        options: The strategy's own arguments.
    """
    search = resolve_name(f"treegen.search.strategies.{strategy}")
    outcome: SearchOutcome = await search(
        on.root, on.propose, on.evaluate, on.done, **options, **get_tree_limits(on)
    )
    return outcome


async def _beam(on: MethodContext) -> "SearchOutcome":
    return await _search_tree(on, "beam:beam", width=on.settings.width)


async def _dvts(on: MethodContext) -> "SearchOutcome":
    return await _search_tree(on, "beam:dvts", subtrees=on.settings.width)


async def _bfs(on: MethodContext) -> "SearchOutcome":
    options = {"breadth": on.settings.width, "solutions": _limit_solutions(on)}
    return await _search_tree(on, "tree_of_thoughts:bfs", **options)


async def _dfs(on: MethodContext) -> "SearchOutcome":
    threshold = on.settings.prune_below
    options = {"prune_below": -math.inf if threshold is None else threshold}
    return await _search_tree(on, "tree_of_thoughts:dfs", **options, solutions=_limit_solutions(on))


async def _rebase(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.rebase import rebase

    width = on.settings.width * on.settings.expand
    return await rebase(on.root, on.step, on.chance, on.done, width=width, **get_tree_limits(on))


async def _best_first(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.tree_of_thoughts import best_first

    return await best_first(
        on.root, on.propose, on.evaluate, on.done, solutions=_limit_solutions(on), state=on.state
    )


def _limit_solutions(on: MethodContext) -> int | None:
    # If solutions can be checked, one solution is not enough: it may be wrong.
    return None if on.checkable else 1


_TREE: Final = ("width", "depth", "expand", "propose", "evaluate")
_MCTS: Final = ("depth", "expand", "propose", "evaluate", "exploration", "iterations", "rollouts")
_LATS: Final = ("depth", "expand", "evaluate", "exploration", "iterations")

_METHODS: Final = {
    "sample": Method(_sample, ("width",)),
    "best-of-n": Method(_best_of_n, ("num_samples", "evaluate")),
    "majority": Method(_majority, ("num_samples", "width"), votes=True, needs_text=True),
    "beam": Method(_beam, _TREE),
    "dvts": Method(_dvts, _TREE, ends_early=False),
    "rebase": Method(_rebase, ("width", "depth", "expand", "evaluate"), on_scale=True),
    "tot-bfs": Method(_bfs, _TREE),
    "tot-dfs": Method(_dfs, ("depth", "expand", "propose", "evaluate", "prune_below")),
    "best-first": Method(_best_first, ("expand", "propose", "evaluate")),
    "mcts": Method(mcts, _MCTS, on_scale=True),
    "ab-mcts": Method(ab_mcts, ("depth", "evaluate", "iterations"), on_scale=True),
    "lats": Method(lats, _LATS, needs_agent=True, on_scale=True),
    "rstar": Method(rstar, _MCTS, votes=True, needs_text=True, on_scale=True),
    "self-refine": Method(self_refine, (), joins_path=False, needs_text=True),
}
METHODS: Final[Mapping[str, Method]] = {
    name: replace(method, arguments=read_signature(method.run)) for name, method in _METHODS.items()
}

TEXT_METHODS: Final = tuple(name for name, method in METHODS.items() if not method.needs_agent)
"""The methods that search texts."""


def solution_text(method: str, tree: "SearchTree", node: int) -> str:
    """Return the text of the solution that ends with a node.

    Args:
        method: The name of the method that made the tree; custom methods join the whole path.
        tree: The tree.
        node: The id of the node.
    """
    joins_path = method not in METHODS or METHODS[method].joins_path
    return tree.path_text(node) if joins_path else tree.nodes[node].text


def methods_with_setting(setting: str) -> Iterable[str]:
    """Return the names of the methods that read a setting."""
    return (name for name, method in METHODS.items() if setting in method.setting_names)


def explain_unread(method: str, setting: str, *, checkable: bool) -> str | None:
    """Return why a setting that a method may read has no effect on it; None if it has one.

    Args:
        method: The name of a method that comes with treegen.
        setting: The name of the setting.
        checkable: Whether the task can check solutions.
    """
    setting_names = METHODS[method].setting_names
    reason = None
    if setting in ("step_tokens", "step_stop") and not {"depth", "expand"} & {*setting_names}:
        reason = "which draws whole solutions"
    elif setting == "choose" and METHODS[method].votes:
        reason = "which takes a vote of its own"
    elif setting == "choose" and "evaluate" not in setting_names:
        reason = "which evaluates no solutions"
    elif setting == "width" and method == "sample" and not checkable:
        reason = "which draws one solution if the task cannot check solutions"
    return reason and f"on {method}, {reason}"
