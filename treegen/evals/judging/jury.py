"""Combining several judges into one: by the weighted mean or by the majority."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Final

from treegen.common.checks import as_tuple, check_number
from treegen.errors import InputError, arg

COMBINES: Final = ("mean", "majority")


def check_jury(
    num_judges: int, weights: Sequence[float] | None, combine: str
) -> tuple[float, ...] | None:
    """Check the settings of a jury and return its weights.

    Args:
        num_judges: Number of judges.
        weights: A weight above 0 for each judge; None for equal weights.
        combine: "mean" or "majority".

    Returns:
        The weights; None for equal weights.

    Raises:
        InputError: a weight or `combine` is invalid, or is set although there is one judge.
    """
    if combine not in COMBINES:
        raise InputError(f"{arg('combine')} must be {' or '.join(COMBINES)}, got {combine!r}")
    if num_judges == 1:
        for name, is_set in (("weights", weights is not None), ("combine", combine != "mean")):
            if is_set:
                raise InputError(
                    f"{arg(name + '=')} is of several judges; give {arg('judge=')} more than once"
                )
    if weights is None:
        return None
    weights = as_tuple("weights", weights)
    for weight in weights:
        check_number("each of weights", weight)
    if len(weights) != num_judges:
        raise InputError(f"there are {len(weights)} weights for {num_judges} judges; give one each")
    if any(weight <= 0 for weight in weights):
        raise InputError(f"the weights of judges must be above 0, got {list(weights)}")
    return weights


def jury_of(
    rows: Sequence[tuple[Any, ...]], weights: Sequence[float] | None, combine: str
) -> list[tuple[float, Any, Any, int, Any]]:
    """Combine the judges' values into the values of one judge, for each answer and wording.

    If an answer has no readable verdict of a judge, the other judges decide.

    Args:
        rows: (value, problem, answer, number of the judge, wording).
        weights: The weight of each judge; None for equal weights.
        combine: "mean" is the weighted mean of the values. "majority" is 1 if more than half of the
            weight is on values above 0.5, 0 if less is, and 0.5 for a tie; a value of 0.5 counts
            half. See `check_jury`.

    Returns:
        Rows like the arguments, with judge number 0.
    """
    num = max(row[3] for row in rows) + 1
    of_judge = [1.0] * num if weights is None else [float(weight) for weight in weights]
    votes: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    place: dict[Hashable, tuple[Any, Any, Any]] = {}
    for value, problem, answer, judge, wording in rows:
        votes[answer, wording].append((value, of_judge[judge]))
        place[answer, wording] = problem, answer, wording
    combined = []
    for key, mine in votes.items():
        problem, answer, wording = place[key]
        total = math.fsum(weight for _, weight in mine)
        if combine == "majority":
            votes_for = math.fsum(_vote(value) * weight for value, weight in mine)
            value = _vote(votes_for / total)
        else:
            value = math.fsum(v * weight for v, weight in mine) / total
        combined.append((value, problem, answer, 0, wording))
    return combined


def _vote(value: float) -> float:
    return 0.5 if math.isclose(value, 0.5) else float(value > 0.5)
