"""A mean of judgements, corrected by labels that people gave to a part of the answers.

Prediction-powered inference (Angelopoulos et al. 2023, Science 382) with the tuning of its weight
(Angelopoulos, Duchi and Zrnic 2023, "PPI++"). With f the judge's value of a problem and y the
people's,

    mean = weight * mean over all of f + mean over labelled problems of (y - weight * f)

is right on average whatever the judge does, and as narrow as the judge is good. The weight is that
of least variance, between 0 (labels alone) and 1, estimated as in the authors' package, ppi-python;
below 10 labelled problems it is 0, as so few cannot tell it. The unit is the problem. Problems with
labels have to be drawn by chance, or the correction is that of other problems.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from treegen.errors import InputError
from treegen.evals.judging.statistics.interval import quantile
from treegen.evals.statistics.estimators import adjusted_mean

_FEWEST: Final = 10  # labelled problems, for a weight


@dataclass(frozen=True, slots=True)
class CorrectedMean:
    """A mean corrected by labels, with its 95% interval.

    value, stderr, low, high: from 0 to 1.
    judge: the mean of judgements alone. bias: how much higher the judge is on labelled problems.
    labels_low, labels_high: the interval by labels alone.
    weight: how much the judge counts. labelled, problems: how many.
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
    """Return the corrected mean.

    Args:
        labels: Of each labelled problem, what people and the judge say of its labelled answers,
            from 0 to 1.
        judged: Of each labelled problem, what people and the judge say of its labelled answers,
            from 0 to 1.
        others: What the judge says of the other problems.

    Raises:
        InputError: fewer than two problems have labels, or scipy is not installed.
    """
    n, m = len(labels), len(others)
    if n < 2 or len(judged) != n:
        raise InputError(f"a correction needs labels of at least 2 problems, got {n}")
    y, f, rest = (np.asarray(each, dtype=np.float64) for each in (labels, judged, others))
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
    freedom = n - 1.0  # of few labels also the weight is uncertain
    if weight > 0:
        value += weight * float(rest.mean())
        center += weight * float(rest.mean())
        # Of a few others the spread is that of all judgements.
        own = weight**2 * spread / m
        freedom = (variance + own) ** 2 / (variance**2 / freedom + own**2 / max(n + m - 1, 1))
        variance += own
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
