"""Intervals for means of judgements that account for problems, judges and wordings.

The usual standard error treats judge and wording as fixed. Here each factor with several levels
adds the variance of the mean over its levels:

    V = V_problem + V_judge + V_wording,  V_f = s^2(means of the levels of f) / (levels of f)

A mean can be corrected by labels that people gave to some of the answers: `correct_mean`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from treegen.errors import InputError, require_extra
from treegen.evals.judging.components import Cells
from treegen.evals.statistics.estimators import adjusted_mean, find_clusters, standard_error

CONFIDENCE: Final = 0.95
FEW_LEVELS_CONFIDENCE: Final = 0.96
"""The confidence level of the quantiles for judges and wordings."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of judgements with its interval."""

    value: float
    """The mean over problems of the means of their answers, from 0 to 1."""
    stderr: float | None
    """The standard error, including judges and wordings; None for a single problem."""
    low: float
    """The lower bound of the 95% interval."""
    high: float
    """The upper bound of the 95% interval."""
    naive: float | None
    """The standard error over problems only, with judges and wordings treated as fixed."""
    fixed_factors: tuple[str, ...]
    """The factors with a single level, which the interval treats as fixed."""
    low_fixed: float
    """The lower bound of the 95% interval for these judges and wordings only."""
    high_fixed: float
    """The upper bound of the 95% interval for these judges and wordings only."""


def mean_of(values: Cells, clusters: Mapping[int, str] | None = None) -> Mean:
    """Return the mean of cells with its interval.

    The variance is the sum over problems, judges and wordings in the docstring of the module. Each
    of the three parts includes a residual, so the sum is too large rather than too small; for the
    balanced two-way design, the sum minus that residual is the usual estimate (Brennan 2001,
    "Generalizability Theory"). Problems count as in `treegen.evals.statistics.estimators`: with two
    imaginary problems, and by cluster.

    Each part has its own quantile of Student's t with its own degrees of freedom, and the half
    width is the root of the sum of (t_f^2 V_f). Banerjee (1961) shows that the coverage is at least
    the nominal one. Satterthwaite's joint degrees of freedom give narrower intervals, whose
    coverage drops to 0.82 if two judges differ much. Student's quantiles are for normal effects.
    For judges and wordings, which are few, the 96% quantiles are used, so that uniform effects have
    a coverage of 0.93 too (0.92 with 95% quantiles and two or three levels). A factor with a single
    level, such as one judge, is treated as fixed, and the interval holds for this level only.
    docs/internals/intervals.md lists the coverage, which
    tests/evals/judging/test_grading_statistics.py simulates.

    Args:
        values: The values, with problem, answer, judge and wording.
        clusters: The cluster of each problem, by number, if problems are not independent; empty
            for a problem without a cluster.

    Raises:
        InputError: scipy is not installed.
    """
    by_problem = _means(values, "problem")
    groups = find_clusters(clusters or {}, range(len(by_problem)))
    value = math.fsum(by_problem) / len(by_problem)
    adjusted = adjusted_mean(by_problem, 0.0, 1.0, groups)
    halves = [quantile(0.5 + CONFIDENCE / 2, adjusted.freedom) * adjusted.error]
    level_variances = []
    fixed = []
    for name in ("judge", "wording"):
        means = _means(values, name)
        if len(means) < 2:
            fixed.append(name)
            continue
        level_variances.append(float(np.var(means, ddof=1)) / len(means))
        halves.append(
            quantile(0.5 + FEW_LEVELS_CONFIDENCE / 2, len(means) - 1.0)
            * math.sqrt(level_variances[-1])
        )
    half, problem_half = math.hypot(*halves), halves[0]
    naive = standard_error(by_problem, groups)
    stderr = None if naive is None else math.sqrt(naive**2 + math.fsum(level_variances))
    return Mean(
        value=min(1.0, max(0.0, value)),
        stderr=stderr,
        low=max(0.0, min(value, adjusted.center - half)),
        high=min(1.0, max(value, adjusted.center + half)),
        naive=naive,
        fixed_factors=tuple(fixed),
        low_fixed=max(0.0, min(value, adjusted.center - problem_half)),
        high_fixed=min(1.0, max(value, adjusted.center + problem_half)),
    )


def quantile(share: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution."""
    with require_extra("intervals need scipy", "judge"):
        from scipy.stats import t
    return float(t.ppf(share, freedom))


def _means(values: Cells, name: str) -> list[float]:
    """Return the mean of each level of a factor, with equal weights for problems.

    The mean of a level without cells of some problems is over the problems that it has.
    """
    level, problem = values.levels[name], values.levels["problem"]
    num = int(problem.max()) + 1
    joint = level * num + problem
    pairs, inverse = np.unique(joint, return_inverse=True)
    means = np.bincount(inverse, weights=values.y) / np.bincount(inverse)
    of_level = pairs // num
    sums = np.bincount(of_level, weights=means) / np.bincount(of_level)
    return [float(mean) for mean in sums]


MIN_LABELLED_PROBLEMS: Final = 10  # minimum labelled problems for a weight above 0


@dataclass(frozen=True, slots=True)
class CorrectedMean:
    """A mean corrected by labels, with its 95% interval."""

    value: float
    """The corrected mean."""
    stderr: float
    """The standard error of the corrected mean."""
    low: float
    """The lower bound of the 95% interval."""
    high: float
    """The upper bound of the 95% interval."""
    judge: float
    """The mean of judgements only."""
    bias: float
    """The mean difference of judge and labels on labelled problems."""
    labels: float
    """The mean of the labels only, over problems."""
    labels_low: float
    """The lower bound of the interval that uses labels only."""
    labels_high: float
    """The upper bound of the interval that uses labels only."""
    weight: float
    """The weight of the judge, from 0 to 1."""
    labelled: int
    """Number of labelled problems."""
    problems: int
    """Number of all problems."""


def correct_mean(
    labels: Sequence[float], judged: Sequence[float], unlabelled: Sequence[float]
) -> CorrectedMean:
    """Return the mean corrected by labels: prediction-powered inference with a tuned weight.

    Sources: Angelopoulos et al. 2023, Science 382; Angelopoulos, Duchi and Zrnic 2023, "PPI++". The
    unit is the problem. Problems with labels must be drawn at random; otherwise the correction is
    that of other problems. Let f be the judge's value of a problem and y the people's. The estimate

        weight * mean over unlabelled problems of f + mean over labelled ones of (y - weight * f)

    is right on average whatever the judge does, and its interval is narrower the better the judge
    is. The weight minimizes the variance, between 0 (labels only) and 1, and is estimated as in the
    authors' package, ppi-python. Below 10 labelled problems it is 0, because so few do not
    determine it.

    Args:
        labels: For each labelled problem, the mean label of its labelled answers, from 0 to 1.
        judged: For each labelled problem, the judge's mean value of the same answers, from 0 to 1.
        unlabelled: For each other problem, the judge's mean value, from 0 to 1.

    Raises:
        InputError: fewer than two problems have labels, or scipy is not installed.
    """
    n, m = len(labels), len(unlabelled)
    if n < 2 or len(judged) != n:
        raise InputError(f"a correction requires labels for at least 2 problems, got {n}")
    y, f, f_unlabelled = (
        np.asarray(values, dtype=np.float64) for values in (labels, judged, unlabelled)
    )
    weight = 0.0
    spread = float(np.var(np.concatenate([f, f_unlabelled]), ddof=1))
    if n >= MIN_LABELLED_PROBLEMS and m and spread > 0:
        covariance = float(np.cov(y, f, ddof=0)[0, 1])
        weight = min(1.0, max(0.0, covariance / (spread * (1 + n / m))))
    by_labels = adjusted_mean(labels, 0.0, 1.0)
    half_labels = quantile(0.975, by_labels.freedom) * by_labels.error
    of_labels = float(y.mean())
    rectified = adjusted_mean((y - weight * f).tolist(), -weight, 1.0)
    value = float((y - weight * f).mean())
    variance, center = rectified.error**2, rectified.center
    freedom = n - 1.0  # fewer than adjusted_mean gives, because the weight is uncertain too
    if weight > 0:
        value += weight * float(f_unlabelled.mean())
        center += weight * float(f_unlabelled.mean())
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
        judge=float(np.concatenate([f, f_unlabelled]).mean()),
        bias=float((f - y).mean()),
        labels=of_labels,
        labels_low=max(0.0, min(of_labels, by_labels.center - half_labels)),
        labels_high=min(1.0, max(of_labels, by_labels.center + half_labels)),
        weight=weight,
        labelled=n,
        problems=n + m,
    )
