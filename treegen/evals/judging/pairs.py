"""Results of judging pairs: the strength of each run, and the effect of the order of answers."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treegen.errors import InputError, arg
from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.statistics.preference import (
    PositionBias,
    Strength,
    bradley_terry,
    estimate_position_bias,
)
from treegen.evals.statistics.tables import Cell, Table


@dataclass(frozen=True)
class Pairs:
    """Results of runs in pairwise comparison.

    runs: the paths of the runs.
    strengths: the strength of each run, in the order of `runs`.
    position: the effect of the order of the answers.
    """

    runs: tuple[str, ...]
    strengths: tuple[Strength, ...]
    position: PositionBias

    @property
    def table(self) -> Table:
        """The strengths as a table, strongest run first."""
        rows = sorted(zip(self.runs, self.strengths, strict=True), key=lambda row: -row[1].value)
        return Table(
            "Strength by Bradley and Terry (natural logarithm of odds)",
            ("Run", "Strength", "Low", "High", "Pairs won"),
            tuple((Path(name).name or name, s.value, *_ends(s), s.wins) for name, s in rows),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain dicts and lists."""
        return {
            "strengths": [
                {"run": run, **asdict(s)} for run, s in zip(self.runs, self.strengths, strict=True)
            ],
            "position": asdict(self.position),
        }


def pairs_of(judged: Sequence[JudgementSet]) -> Pairs:
    """Return the results of runs in pairwise comparison by a jury.

    The result of a pair is the mean of both orders, each averaged over wordings, judges and
    repeats. A pair that was judged in only one order is left out.

    Args:
        judged: Judge runs that differ only in their judge.

    Raises:
        InputError: no pair has readable verdicts in both orders.
    """
    wins: dict[tuple[str, tuple[Any, ...]], dict[bool, list[float]]] = defaultdict(dict)
    runs = tuple(str(each["path"]) for each in judged[0].judging.runs)
    for each in judged:
        for one in each.judgements:
            if one.value is None:
                continue
            swapped = one.shown[0] > one.shown[1]
            pair = one.shown[::-1] if swapped else one.shown
            value = 1 - one.value if swapped else one.value
            wins[one.problem_id, pair].setdefault(swapped, []).append(value)
    orders: dict[str, list[tuple[float, float]]] = defaultdict(list)
    pairs = []
    for (problem, pair), mine in wins.items():
        if len(mine) < 2:
            continue
        first, second = (math.fsum(mine[o]) / len(mine[o]) for o in (False, True))
        orders[problem].append((first, second))
        pairs.append((problem, pair[0][0], pair[1][0], (first + second) / 2))
    if not pairs:
        raise InputError(
            "no pair has verdicts in both orders that can be read; give more samples= or another "
            f"{arg('judge=')}"
        )
    return Pairs(runs, tuple(bradley_terry(pairs, len(runs))), estimate_position_bias(orders))


def _ends(strength: Strength) -> tuple[Cell, Cell]:
    """Return the ends of an interval; "no end" for an end at infinity."""
    return (
        "no end" if strength.low is None else strength.low,
        "no end" if strength.high is None else strength.high,
    )


def order_table(position: PositionBias) -> Table:
    """Return the effect of the order of the answers as a table."""
    return Table(
        f"Order of the answers, in {position.pairs:,} pairs",
        ("", "Share", "Low", "High"),
        (
            ("the answer shown first wins", position.first, position.low, position.high),
            ("the other order has another winner", position.flipped, None, None),
        ),
    )
