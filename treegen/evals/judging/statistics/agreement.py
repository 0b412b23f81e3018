"""Agreement of raters: Cohen's kappa for two, Krippendorff's alpha for any number.

Alpha also allows missing ratings. Sources: Cohen 1960 and 1968 (weights); Krippendorff 2011,
"Computing Krippendorff's Alpha-Reliability", whose example
tests/evals/judging/test_grading_statistics.py computes.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from treegen.errors import InputError

Scale = Literal["nominal", "interval"]


def cohens_kappa(
    first: Sequence[Hashable],
    second: Sequence[Hashable],
    *,
    weights: Literal["quadratic"] | None = None,
) -> float | None:
    """Return Cohen's kappa of two raters; None if both always give the same single rating.

    Args:
        first: The first rater's rating of each unit.
        second: The second rater's rating of each unit, in the same order.
        weights: None counts every disagreement equally. "quadratic" weights a disagreement by the
            squared difference of the numbers, also over numbers that nobody gave: 1 and 5 differ
            by 4. scikit-learn's `cohen_kappa_score` weights by the ranks of the occurring labels,
            so it agrees if its `labels=` lists all numbers from the lowest to the highest.

    Raises:
        InputError: there are no units, or the raters rated different numbers of units.
    """
    if len(first) != len(second) or not first:
        raise InputError(f"kappa needs pairs of ratings, got {len(first)} and {len(second)}")
    values = sorted({*first, *second}, key=lambda v: (str(type(v)), v))
    place = {value: i for i, value in enumerate(values)}
    table = np.zeros((len(values), len(values)))
    np.add.at(table, ([place[v] for v in first], [place[v] for v in second]), 1.0)
    table /= table.sum()
    expected = np.outer(table.sum(axis=1), table.sum(axis=0))
    if weights == "quadratic":
        numbers = np.array(values, dtype=np.float64)
        cost = (numbers[:, None] - numbers[None, :]) ** 2
    else:
        cost = 1.0 - np.eye(len(values))
    by_chance = float((cost * expected).sum())
    return None if by_chance == 0 else 1.0 - float((cost * table).sum()) / by_chance


def krippendorffs_alpha(
    units: Sequence[Sequence[Hashable]], scale: Scale = "nominal"
) -> float | None:
    """Return Krippendorff's alpha; None if all compared values are equal.

    Args:
        units: The values that raters gave to each unit; units with fewer than two are ignored.
        scale: "nominal" counts whether values differ, "interval" their squared difference.
    """
    pairable = [list(unit) for unit in units if len(unit) > 1]
    values = sorted({v for unit in pairable for v in unit}, key=lambda v: (str(type(v)), v))
    if len(values) < 2:
        return None
    place = {value: i for i, value in enumerate(values)}
    coincidences = np.zeros((len(values), len(values)))
    for unit in pairable:
        counts = np.bincount([place[v] for v in unit], minlength=len(values)).astype(np.float64)
        coincidences += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    totals = coincidences.sum(axis=1)
    if scale == "interval":
        numbers = np.array(values, dtype=np.float64)
        cost = (numbers[:, None] - numbers[None, :]) ** 2
    else:
        cost = 1.0 - np.eye(len(values))
    expected = float((cost * np.outer(totals, totals)).sum()) / (totals.sum() - 1)
    observed = float((cost * coincidences).sum())
    return None if math.isclose(expected, 0.0) else 1.0 - observed / expected
