"""The decisions of adaptive branching search: go wider or deeper, and which generator to use."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from treegen.errors import InputError
from treegen.search.posterior import Draw, draw_beta, draw_gaussian, draw_mixed
from treegen.search.tree.node import SearchNode

Rule = Literal["m", "a", "a-beta"]
_DRAWS: Final[Mapping[str, Draw]] = {"a": draw_gaussian, "a-beta": draw_beta}


def check_rule(rule: str) -> None:
    """Raise InputError for an unknown rule."""
    if rule != "m" and rule not in _DRAWS:
        raise InputError(f"rule must be one of m, {', '.join(_DRAWS)}, got {rule!r}")


def deeper(
    options: Sequence[SearchNode],
    children: Sequence[SearchNode],
    barren: Sequence[float],
    values: Mapping[SearchNode, Sequence[float]],
    rule: Rule,
    rng: random.Random,
) -> SearchNode | None:
    """Return the child to continue from; None to generate a new child.

    Args:
        options: Children that may have children.
        children: All children of the node.
        barren: Values of attempts that made no new child.
        values: For each child, its own value and then the values of the nodes below it.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if not options:
        return None
    if rule == "m":
        groups = [*(values[child] for child in children), *([value] for value in barren)]
        *drawn, new = draw_mixed(groups, 1, rng)
        by_child = dict(zip(children, drawn, strict=False))
        best = max(options, key=by_child.__getitem__)
        return best if by_child[best] > new else None
    draw = _DRAWS[rule]
    wider = draw([*(values[child][0] for child in children), *barren], rng)
    if wider >= draw([value for child in children for value in values[child][1:]], rng):
        return None
    drawn = [draw(values[child], rng) for child in options]
    return options[drawn.index(max(drawn))]


def generator(made: Mapping[str, Sequence[float]], rule: Rule, rng: random.Random) -> str:
    """Return the name of the generator to use next.

    Args:
        made: By generator name, the values of all nodes that it has made.
        rule: How scores are drawn; see `ab_mcts`.
        rng: Source of randomness.
    """
    if len(made) == 1:
        return next(iter(made))
    if rule == "m":
        names = sorted(made, key=lambda name: not made[name])  # those without values come last
        seen = [made[name] for name in names if made[name]]
        drawn = draw_mixed(seen, len(names) - len(seen), rng)
    else:
        names = list(made)
        drawn = [_DRAWS[rule](made[name], rng) for name in names]
    return names[drawn.index(max(drawn))]
