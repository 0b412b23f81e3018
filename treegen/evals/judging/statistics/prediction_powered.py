"""Means of judgements, corrected by labels that people gave to some of the answers.

This is prediction-powered inference (Angelopoulos et al. 2023, Science 382) with a tuned weight
(Angelopoulos, Duchi and Zrnic 2023, "PPI++"). The unit is the problem. Problems with labels must be
drawn at random; otherwise the correction is that of other problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from treegen.errors import InputError
from treegen.evals.judging.statistics.interval import quantile
from treegen.evals.statistics.estimators import adjusted_mean

_FEWEST: Final = 10  # minimum labelled problems for a weight above 0


@dataclass(frozen=True, slots=True)
class CorrectedMean:
    """A mean corrected by labels, with its 95% interval.

    value, stderr, low, high: the corrected mean, its standard error and its interval.
    judge: the mean of judgements only.
    bias: the mean difference of judge and labels on labelled problems.
    labels_low, labels_high: the interval by labels only.
    weight: the weight of the judge, from 0 to 1.
    labelled, problems: number of labelled problems, and of all problems.
    """

    value: float
    stderr: float
    low: float
    high: float
    judge: float
    bias: float
    labels_low: float
    labels_high: float
    weight: float
    labelled: int
    problems: int


def correct_mean(
    labels: Sequence[float], judged: Sequence[float], others: Sequence[float]
) -> CorrectedMean:
    """Return the mean corrected by labels.

    Let f be the judge's value of a problem and y the people's. The estimate

        weight * mean over unlabelled problems of f + mean over labelled ones of (y - weight * f)

    is right on average whatever the judge does, and its interval is narrower the better the judge
    is. The weight minimizes the variance, between 0 (labels only) and 1, and is estimated as in the
    authors' package, ppi-python. Below 10 labelled problems it is 0, because so few do not
    determine it.

    Args:
        labels: For each labelled problem, the mean label of its labelled answers, from 0 to 1.
        judged: For each labelled problem, the judge's mean value of the same answers, from 0 to 1.
        others: For each other problem, the judge's mean value, from 0 to 1.

    Raises:
        InputError: fewer than two problems have labels, or scipy is not installed.
    """
    n, m = len(labels), len(others)
    if n < 2 or len(judged) != n:
        raise InputError(f"a correction needs labels of at least 2 problems, got {n}")
    y, f, rest = (np.asarray(values, dtype=np.float64) for values in (labels, judged, others))
    weight = 0.0
    spread = float(np.var(np.concatenate([f, rest]), ddof=1))
    if n >= _FEWEST and m and spread > 0:
        covariance = float(np.cov(y, f, ddof=0)[0, 1])
        weight = min(1.0, max(0.0, covariance / (spread * (1 + n / m))))
    by_labels = adjusted_mean(labels, 0.0, 1.0)
    half_labels = quantile(0.975, by_labels.freedom) * by_labels.error
    rectified = adjusted_mean((y - weight * f).tolist(), -weight, 1.0)
    value = float((y - weight * f).mean())
    variance, center = rectified.error**2, rectified.center
    freedom = n - 1.0  # fewer than adjusted_mean gives, because the weight is uncertain too
    if weight > 0:
        value += weight * float(rest.mean())
        center += weight * float(rest.mean())
        # The spread of all judgements is used, because there may be few unlabelled problems.
        judge_variance = weight**2 * spread / m
        freedom = (variance + judge_variance) ** 2 / (
            variance**2 / freedom + judge_variance**2 / max(n + m - 1, 1)
        )
        variance += judge_variance
    else:
        center, variance, freedom = by_labels.center, by_labels.error**2, by_labels.freedom
    half = quantile(0.975, freedom) * math.sqrt(variance)
    value = min(1.0, max(0.0, value))
    return CorrectedMean(
        value=value,
        stderr=math.sqrt(variance),
        low=max(0.0, min(value, center - half)),
        high=min(1.0, max(value, center + half)),
        judge=float(np.concatenate([f, rest]).mean()),
        bias=float((f - y).mean()),
        labels_low=max(0.0, by_labels.center - half_labels),
        labels_high=min(1.0, by_labels.center + half_labels),
        weight=weight,
        labelled=n,
        problems=n + m,
    )
