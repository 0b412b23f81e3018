"""The choices of adaptive branching search: wider or deeper, and who generates."""

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
    """Raise InputError for a rule that is not known."""
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
    """The child to go on from; None for a new child.

    Args:
        options: The children that may have children.
        children: All that there are.
        barren: Values of attempts that made no new child.
        values: Of each child, its own first, then those below it.
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
    """The name of what generates next. made: the values of all that each has made."""
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
