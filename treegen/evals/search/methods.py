"""The methods of `treegen search`: their names, their strategies, and the settings they read.

METHODS contains all of them. Help, checks and searches read it, and nothing else names methods.
Strategies are imported when they run, so that help is fast.
"""

import math
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from treegen.evals.search.method_arguments import read_signature
from treegen.evals.search.method_types import Method, MethodContext
from treegen.evals.search.tree_methods import (
    ab_mcts,
    get_tree_limits,
    lats,
    mcts,
    rstar,
    self_refine,
)

if TYPE_CHECKING:
    from treegen.search.tree.records import SearchTree
    from treegen.search.tree.result import SearchOutcome


async def _sample(on: MethodContext) -> "SearchOutcome":
    """Draw one solution; if the task can be checked, draw `width` solutions at once."""
    from treegen.search.budget import BudgetReached
    from treegen.search.strategies.best_of_n import best_of_n
    from treegen.search.tree.result import SearchOutcome

    if on.acts:
        return await best_of_n(on.root, 1, on.evaluate, play=on.finish)
    if not on.checkable:
        (only,) = await on.root.sample(1)
        return SearchOutcome(only, (only,))
    try:
        fitting = on.root.search.max_fitting_samples(
            on.knobs.width, on.root.search.params.max_tokens
        )
        samples = await on.root.sample(max(1, fitting))
    except BudgetReached as end:
        return SearchOutcome(None, stopped=str(end))
    return SearchOutcome(None, tuple(samples))


async def _best_of_n(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.best_of_n import best_of_n

    play = on.finish if on.acts else None
    return await best_of_n(on.root, on.knobs.num_samples, on.evaluate, play=play)


async def _majority(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.majority import majority

    most, batch = on.knobs.num_samples, on.knobs.width
    return await majority(on.root, on.answer, max_samples=most, batch=batch)


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
    return await _search_tree(on, "beam:beam", width=on.knobs.width)


async def _dvts(on: MethodContext) -> "SearchOutcome":
    return await _search_tree(on, "beam:dvts", subtrees=on.knobs.width)


async def _bfs(on: MethodContext) -> "SearchOutcome":
    options = {"breadth": on.knobs.width, "solutions": _enough(on)}
    return await _search_tree(on, "tree_of_thoughts:bfs", **options)


async def _dfs(on: MethodContext) -> "SearchOutcome":
    threshold = on.knobs.prune_below
    options = {"prune_below": -math.inf if threshold is None else threshold}
    return await _search_tree(on, "tree_of_thoughts:dfs", **options, solutions=_enough(on))


async def _rebase(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.rebase import rebase

    width = on.knobs.width * on.knobs.expand
    return await rebase(on.root, on.step, on.chance, on.done, width=width, **get_tree_limits(on))


async def _best_first(on: MethodContext) -> "SearchOutcome":
    from treegen.search.strategies.tree_of_thoughts import best_first

    return await best_first(
        on.root, on.propose, on.evaluate, on.done, solutions=_enough(on), state=on.state
    )


def _enough(on: MethodContext) -> int | None:
    # If solutions can be checked, one solution is not enough: it may be wrong.
    return None if on.checkable else 1


_TREE: Final = ("width", "depth", "expand", "propose", "evaluate")

METHODS: Final[Mapping[str, Method]] = {
    "sample": Method(_sample, ("width",)),
    "best-of-n": Method(_best_of_n, ("num_samples", "evaluate")),
    "majority": Method(_majority, ("num_samples", "width"), votes=True, needs_text=True),
    "beam": Method(_beam, _TREE),
    "dvts": Method(_dvts, _TREE, ends_early=False),
    "rebase": Method(_rebase, ("width", "depth", "expand", "evaluate"), on_scale=True),
    "tot-bfs": Method(_bfs, _TREE),
    "tot-dfs": Method(_dfs, ("depth", "expand", "propose", "evaluate", "prune_below")),
    "best-first": Method(_best_first, ("expand", "propose", "evaluate")),
    "mcts": Method(
        mcts,
        ("depth", "expand", "propose", "evaluate", "exploration", "iterations", "rollouts"),
        on_scale=True,
        arguments=read_signature(mcts),
    ),
    "ab-mcts": Method(
        ab_mcts,
        ("depth", "evaluate", "iterations"),
        on_scale=True,
        arguments=read_signature(ab_mcts),
    ),
    "lats": Method(
        lats,
        ("depth", "expand", "evaluate", "exploration", "iterations"),
        needs_agent=True,
        on_scale=True,
        arguments=read_signature(lats),
    ),
    "rstar": Method(
        rstar,
        ("depth", "expand", "propose", "evaluate", "exploration", "iterations", "rollouts"),
        votes=True,
        needs_text=True,
        on_scale=True,
        arguments=read_signature(rstar),
    ),
    "self-refine": Method(
        self_refine,
        (),
        joins_path=False,
        arguments=read_signature(self_refine),
        needs_text=True,
    ),
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


def methods_with_setting(knob: str) -> Iterable[str]:
    """Return the names of the methods that read a setting."""
    return (name for name, method in METHODS.items() if knob in method.knobs)
