"""Several judges: how they are combined into one, and how far they agree.

Judges are combined by the weighted mean or by the majority. Agreement is Cohen's kappa for two
(Cohen 1960, and 1968 for weights) and Krippendorff's alpha for any number, also with missing
ratings (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability", whose example
tests/evals/judging/test_grading_statistics.py computes).
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
                    f"{arg(name + '=')} requires several judges; pass several values of "
                    f"{arg('judge=')}"
                )
    if weights is None:
        return None
    weights = as_tuple("weights", weights)
    for weight in weights:
        check_number("each of weights", weight)
    if len(weights) != num_judges:
        raise InputError(
            f"there are {len(weights)} weights for {num_judges} judges; give one weight per judge"
        )
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
    case_of: dict[Hashable, tuple[Any, Any, Any]] = {}
    for value, problem, answer, judge, wording in rows:
        votes[answer, wording].append((value, of_judge[judge]))
        case_of[answer, wording] = problem, answer, wording
    combined = []
    for key, weighted_votes in votes.items():
        problem, answer, wording = case_of[key]
        total = math.fsum(weight for _, weight in weighted_votes)
        if combine == "majority":
            votes_for = math.fsum(_vote(value) * weight for value, weight in weighted_votes)
            value = _vote(votes_for / total)
        else:
            value = math.fsum(v * weight for v, weight in weighted_votes) / total
        combined.append((value, problem, answer, 0, wording))
    return combined


def _vote(value: float) -> float:
    return 0.5 if math.isclose(value, 0.5) else float(value > 0.5)


def cohens_kappa(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Cohen's kappa of two raters; None if both always give the same single rating.

    A disagreement is weighted by the squared difference of the numbers, also over numbers that
    nobody gave: 1 and 5 differ by 4. scikit-learn's `cohen_kappa_score` with weights="quadratic"
    weights by the ranks of the occurring labels, so it agrees if its `labels=` lists all numbers
    from the lowest to the highest.

    Args:
        first: The first rater's rating of each unit.
        second: The second rater's rating of each unit, in the same order.

    Raises:
        InputError: there are no units, or the raters rated different numbers of units.
    """
    if len(first) != len(second) or not first:
        raise InputError(
            f"both raters must rate the same units, at least one, got {len(first)} and "
            f"{len(second)} ratings"
        )
    index_of, cost = _costs({*first, *second})
    table = np.zeros(cost.shape)
    np.add.at(table, ([index_of[v] for v in first], [index_of[v] for v in second]), 1.0)
    table /= table.sum()
    expected = np.outer(table.sum(axis=1), table.sum(axis=0))
    by_chance = float((cost * expected).sum())
    return None if by_chance == 0 else 1.0 - float((cost * table).sum()) / by_chance


def _costs(ratings: Set[float]) -> tuple[dict[float, int], npt.NDArray[np.float64]]:
    """Return the index of each distinct rating, and the squared difference of each pair."""
    numbers = np.array(sorted(ratings), dtype=np.float64)
    index_of = {rating: i for i, rating in enumerate(sorted(ratings))}
    return index_of, (numbers[:, None] - numbers[None, :]) ** 2


def krippendorffs_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Return Krippendorff's alpha on the interval scale; None if all compared values are equal.

    Args:
        units: The values that raters gave to each unit; units with fewer than two are ignored.
    """
    pairable = [list(unit) for unit in units if len(unit) > 1]
    index_of, cost = _costs({v for unit in pairable for v in unit})
    if len(index_of) < 2:
        return None
    coincidences = np.zeros(cost.shape)
    for unit in pairable:
        counts = np.bincount([index_of[v] for v in unit], minlength=len(index_of)).astype(
            np.float64
        )
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    totals = coincidences.sum(axis=1)
    expected = float((cost * np.outer(totals, totals)).sum()) / (totals.sum() - 1)
    observed = float((cost * coincidences).sum())
    return None if math.isclose(expected, 0.0) else 1.0 - observed / expected
