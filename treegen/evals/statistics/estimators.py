"""Estimators over samples: pass@k, and error bars that treat problems as the independent unit."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError

_Floats = npt.NDArray[np.float64]
_Key = TypeVar("_Key", bound=Hashable)

# The 97.5% quantile of Student's t as a polynomial in 2 / degrees of freedom. This Chebyshev fit is
# accurate to 1e-10 from 2 degrees of freedom. The first term is the normal distribution's quantile.
_T95: Final = (
    1.9599639845809451,
    1.1861356024412588,
    0.7056253108111072,
    0.31946782884836494,
    0.09948762612679242,
    0.022013452832788542,
    0.013325522462219996,
    -0.007859257444667912,
    0.00633490934577669,
    -0.002192819008489764,
    0.0003505687786717305,
)
# Spreads and variances up to this are rounding errors of equal values.
_NO_SPREAD: Final = 1e-12
# A group with fewer values does not determine its own spread; see `mean_of_means`.
_MIN_SAMPLES: Final = 5


def mean_by(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Return the mean value of each key in (key, value) pairs, in the order of the keys."""
    values = defaultdict[_Key, list[float]](list)
    for key, value in pairs:
        values[key].append(value)
    return {key: fmean(key_values) for key, key_values in values.items()}


def find_clusters(
    group_of: Mapping[_Key, str], problems: Iterable[_Key]
) -> list[tuple[Hashable, ...]] | None:
    """Return the cluster of each problem for error bars; None if no problem has a group.

    Args:
        group_of: The group of each problem; absent or empty for a problem without a group, which
            is a cluster of its own.
        problems: The problems.
    """
    if not any(group_of.values()):
        return None
    return [(group_of[key],) if group_of.get(key) else ("", key) for key in problems]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, its standard error, and a 95% interval."""

    value: float
    """The mean."""
    stderr: float | None
    """Its standard error; None for a single problem, which has no spread."""
    low: float
    """The lower bound of the interval."""
    high: float
    """The upper bound of the interval."""
    num_problems: int
    """Number of problems."""


def estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Return the mean of per-problem values in [0, 1] with its error bars.

    Problems are independent draws. Samples of one problem are not, so each problem gives one value.
    See `mean_interval` for the interval.

    Args:
        values: One value from 0 to 1 for each problem.
        clusters: The cluster of each problem, if problems of one cluster are not independent. The
            standard error is then cluster-robust; see `standard_error`.

    Raises:
        InputError: there is no value, or a value is outside [0, 1].
    """
    if not values:
        raise InputError("an estimate needs at least one problem")
    array = np.asarray(values, dtype=np.float64)
    if not ((array >= 0) & (array <= 1)).all():
        worst = next(value for value in values if not 0 <= value <= 1)
        raise InputError(
            f"an estimate needs values from 0 to 1, one for each problem; got {worst!r:.40}"
        )
    num = len(values)
    # fsum is exact, so the result does not depend on the order of the problems.
    mean = min(1.0, math.fsum(values) / num)
    low, high = mean_interval(values, 0.0, 1.0, clusters)
    return Estimate(mean, standard_error(values, clusters), low, high, num)


def standard_error(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> float | None:
    """Return the standard error of a mean; None for a single value or cluster.

    With G clusters it is sqrt(G / (G - 1) * sum over clusters of (sum of deviations)^2) / n, which
    regression programs call cluster-robust (CR1). If each value is its own cluster, this is the
    usual s / sqrt(n).
    """
    num = len(values)
    mean = math.fsum(values) / num
    sums, sizes = _by_cluster(values, clusters)
    if len(sums) < 2:
        return None
    squares = math.fsum((total - mean * n) ** 2 for total, n in zip(sums, sizes, strict=True))
    return math.sqrt(squares * len(sums) / (len(sums) - 1)) / num


def unbounded_error(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float] | None:
    """Return the standard error of a mean and its degrees of freedom, for Student's t.

    Use it for values without bounds. If one cluster has most of the values, the mean is nearly the
    mean of that cluster, so the deviation of the cluster from it says nothing about the error. The
    error is therefore that of the jackknife: each cluster counts with its distance from the mean of
    all other clusters. The degrees of freedom are 1 less than the effective number of clusters (see
    `mean_interval`), but at least 1. For clusters of equal size both are the usual formulas.

    Returns:
        The standard error and the degrees of freedom; None for a single value or cluster.
    """
    sums, sizes = _by_cluster(values, clusters)
    num, total = len(sums), len(values)
    if num < 2:
        return None
    mean = math.fsum(values) / total
    moves = [(value - mean * n) / (total - n) for value, n in zip(sums, sizes, strict=True)]
    error = math.sqrt(math.fsum(value**2 for value in moves) * (num - 1) / num)
    return error, max(1.0, total / _usual_size(sizes) - 1)


@dataclass(frozen=True, slots=True)
class AdjustedMean:
    """A mean over observations and two imaginary observations, for intervals by Student's t."""

    center: float
    """The mean, including the imaginary observations."""
    error: float
    """Its standard error, never 0."""
    freedom: float
    """Degrees of freedom, at least 2."""

    @property
    def statistic(self) -> float:
        """Student's t of the hypothesis that the mean is 0.

        Its two-sided p-value is below 0.05 exactly if `interval` does not contain 0.
        """
        return self.center / self.error

    def interval(self, least: float, most: float) -> tuple[float, float]:
        """Return the 95% interval, clipped to [least, most]."""
        base = 2 / self.freedom
        half = self.error * math.fsum(term * base**power for power, term in enumerate(_T95))
        return max(least, self.center - half), min(most, self.center + half)


def mean_interval(
    values: Sequence[float], least: float, most: float, clusters: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """Return a 95% interval for the mean of problems whose values lie in [least, most].

    It is the adjusted t interval: Student's t interval over the problems and two imaginary
    problems, one with the value `least` and one with `most`, clipped to [least, most]. Agresti and
    Caffo (2000) add one success and one failure for a difference of proportions; here values may
    also be shares. The imaginary problems keep the interval from collapsing if all problems agree,
    and small changes of the values move it little. It covers the mean of right and wrong problems
    at least 93.2% of the time, for any mean and any number of problems (computed up to 1,000).

    With clusters, the two imaginary problems become two imaginary clusters. Each has the mean size,
    over problems, of a problem's cluster: the sum of squared sizes over the sum of sizes. The
    degrees of freedom are 1 + the effective number of clusters, which is (sum of sizes)^2 / sum of
    squared sizes, because a few large clusters make a standard error as uncertain as few clusters
    do (Carter, Schnepel and Steigerwald 2017, without their term for correlation). For clusters of
    equal size the effective number is their number, and clusters of one problem change nothing.
    tests/evals/test_coverage.py simulates 2 to 30 clusters of equal and of ragged sizes, and
    asserts a coverage above 93%.

    Args:
        values: One value for each problem.
        least: Smallest possible value.
        most: Largest possible value.
        clusters: The cluster of each problem, if problems of one cluster are not independent.
    """
    return adjusted_mean(values, least, most, clusters).interval(least, most)


def adjusted_mean(
    values: Sequence[float], least: float, most: float, clusters: Sequence[Hashable] | None = None
) -> AdjustedMean:
    """Return the adjusted mean from which `mean_interval` computes its interval.

    Args:
        values: One value for each problem.
        least: Smallest possible value.
        most: Largest possible value.
        clusters: The cluster of each problem, if problems of one cluster are not independent.
    """
    return _compute_adjusted_mean(*_by_cluster(values, clusters), least, most)


def adjusted_difference(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> AdjustedMean:
    """Return the adjusted mean of paired differences that lie in [-1, 1].

    It is the mean of `mean_interval`, with two imaginary differences, one on either side of the
    mean at the distance from `imaginary_distance`, clipped to [-1, 1]. For right and wrong answers
    these are -1 and 1, as Bonett and Price (2012) add them to paired proportions. For shares they
    are closer.

    With clusters, the distance follows from the mean difference of each cluster. A mean over few
    problems deviates more than a mean over many, unless all problems of a cluster have the same
    difference. Each deviation is therefore scaled to a cluster of the usual size, by the
    correlation within clusters (the estimate of the analysis of variance).

    docs/internals/intervals.md lists the coverage and the width, and docs/guides/compare.md says
    when the coverage is lower.

    Args:
        differences: One difference for each problem.
        clusters: The cluster of each problem, if problems of one cluster are not independent.
    """
    sums, sizes = _by_cluster(differences, clusters)
    total, size = sum(sizes), _usual_size(sizes)
    mean = math.fsum(sums) / total
    number = np.asarray(sizes, dtype=np.float64)
    deviations = np.asarray(sums, dtype=np.float64) / number - mean
    correlation = 1.0 if clusters is None else _correlation(differences, sums, number)
    deviations *= np.sqrt(
        (correlation + (1 - correlation) / size) / (correlation + (1 - correlation) / number)
    )
    distance = float(imaginary_distance(deviations, 1 + abs(mean), total / size))
    return _compute_adjusted_mean(
        sums, sizes, max(-1.0, mean - distance), min(1.0, mean + distance)
    )


def adjusted_rows(differences: _Floats) -> tuple[_Floats, _Floats, float]:
    """Return `adjusted_difference` of each row of paired differences, without clusters.

    Args:
        differences: [comparisons, problems] the differences of each simulated comparison.

    Returns:
        The centers [comparisons], the errors [comparisons] and the degrees of freedom.
    """
    num = differences.shape[1]
    mean = differences.mean(axis=1)
    distance = imaginary_distance(differences - mean[:, None], 1 + abs(mean), num)
    low, high = np.maximum(-1.0, mean - distance), np.minimum(1.0, mean + distance)
    center = (differences.sum(axis=1) + low + high) / (num + 2)
    squares = ((differences - center[:, None]) ** 2).sum(axis=1)
    squares += (low - center) ** 2 + (high - center) ** 2
    return center, np.sqrt(squares / ((num + 1) * (num + 2))), num + 1.0


def imaginary_distance(deviations: _Floats, farthest: float | _Floats, number: float) -> _Floats:
    """Return how far from the mean two imaginary observations lie.

    It is the largest of three distances:

    - The largest observed deviation.
    - Twice the usual gap between neighbouring values, sum of gap^2 / sum of gap. If values are
      coarse, such as 0 and 1, the next possible value may be far from the observed values.
    - A share of the farthest possible distance: 1 / m^2.5 + 1 / (2 number^2). Here m is the number
      of values that make up the spread: (sum of d^2)^2 / sum of d^4, with d the distances from the
      median. If few values deviate, a value that deviates more may exist and not be observed.

    Args:
        deviations: [..., observations] deviations from the mean.
        farthest: Largest possible distance from the mean.
        number: Number of independent observations.

    Returns:
        The distance, with the last axis reduced.
    """
    ordered = np.sort(deviations, axis=-1)  # so sums do not depend on the order of the problems
    largest = np.abs(ordered).max(axis=-1)
    gaps = np.diff(ordered, axis=-1)
    span = gaps.sum(axis=-1)
    spreads = span > _NO_SPREAD
    gap = (gaps**2).sum(axis=-1) / np.where(spreads, span, 1.0)
    middle = np.median(ordered, axis=-1, keepdims=True)
    squares = ((ordered - middle) / np.where(spreads, span, 1.0)[..., None]) ** 2
    fourths = np.where(spreads, (squares**2).sum(axis=-1), 1.0)
    share = fourths / np.where(spreads, squares.sum(axis=-1) ** 2, 1.0)
    unseen = np.minimum(1.0, share**2.5 + 0.5 / number**2)
    distance: _Floats = np.maximum(np.maximum(largest, 2 * gap), farthest * unseen)
    return distance


def difference_interval(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, float]:
    """Return a 95% interval for the mean of paired differences that lie in [-1, 1].

    See `adjusted_difference`.
    """
    return adjusted_difference(differences, clusters).interval(-1.0, 1.0)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for several comparisons at once, by Holm's method (1979).

    The probability that any true null hypothesis has an adjusted p-value below 0.05 is at most
    0.05, however the comparisons depend on each other.

    Args:
        p_values: The p-value of each comparison; None for a comparison without a p-value.

    Returns:
        The adjusted p-values; None for a comparison without a p-value. A single p-value is its own
        adjusted p-value.
    """
    sorted_p = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(sorted_p):
        largest = max(largest, min(1.0, p * (len(sorted_p) - rank)))
        adjusted[i] = largest
    return adjusted


def mean_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the unweighted mean of the means of groups, whose values are in [0, 1].

    The error bars describe other problems of the same groups, so the errors of the groups add up.
    The standard error is None if a group has a single value, which has no spread.

    The interval is as in `mean_interval`. The weight of an imaginary value is the mean weight of
    the real values, weighted by their contributions to the variance. The degrees of freedom are
    1 more than Satterthwaite's (1946) for groups of equal spread. A few values of a group may agree
    by chance and then show no spread. So in groups with fewer than five values, each value counts
    with its distance from the mean of all groups, like "collapsed strata" in surveys. This makes
    the interval too wide if groups differ much, and never too narrow.
    docs/internals/intervals.md lists the coverage.

    Args:
        groups: The values of each group.

    Raises:
        InputError: there is no group, or a group is empty.
    """
    if not groups or not all(groups):
        raise InputError("a mean over groups needs at least one value in each group")
    num = len(groups)
    sizes = [len(group) for group in groups]
    means = [math.fsum(group) / len(group) for group in groups]
    value = min(1.0, math.fsum(means) / num)
    pull = math.fsum(n**-2 for n in sizes) / math.fsum(1 / n for n in sizes) / num
    center = (value + pull) / (1 + 2 * pull)
    spread = [
        math.fsum((x - center) ** 2 for x in group)
        if n < _MIN_SAMPLES
        else math.fsum((x - mean) ** 2 for x in group) * n / (n - 1)
        for group, mean, n in zip(groups, means, sizes, strict=True)
    ]
    variances = [square / (num * n) ** 2 for square, n in zip(spread, sizes, strict=True)]
    imaginary = pull**2 * (center**2 + (1 - center) ** 2)
    small = [n for n in sizes if n < _MIN_SAMPLES]
    uncertainty = [1 / (n * n * (n - 1)) for n in sizes if n >= _MIN_SAMPLES]
    if small:  # the small groups count as one group whose values spread around the mean
        uncertainty.append(math.fsum(1 / n for n in small) ** 2 / max(1, sum(small) - 1))
    freedom = math.fsum(1 / n for n in sizes) ** 2 / math.fsum(uncertainty) + 1
    error = math.sqrt(math.fsum([*variances, imaginary])) / (1 + 2 * pull)
    low, high = AdjustedMean(center, error, max(2.0, freedom)).interval(0.0, 1.0)
    sample_variances = [
        math.fsum((x - mean) ** 2 for x in group) / (n - 1) / n
        for group, mean, n in zip(groups, means, sizes, strict=True)
        if n > 1
    ]
    stderr = None if 1 in sizes else math.sqrt(math.fsum(sample_variances)) / num
    return Estimate(value, stderr, low, high, sum(sizes))


def _by_cluster(
    values: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[Sequence[float], Sequence[int]]:
    """Return the sum of the values of each cluster, and the size of each cluster."""
    if clusters is None:
        return values, [1] * len(values)
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    return [math.fsum(cluster_values) for cluster_values in groups.values()], [
        len(cluster_values) for cluster_values in groups.values()
    ]


def _correlation(values: Sequence[float], sums: Sequence[float], sizes: _Floats) -> float:
    """Return the correlation of values within clusters, from 0 to 1; 1 if it is undetermined."""
    num, total = len(sizes), float(sizes.sum())
    if num < 2 or num == total:
        return 1.0
    means = np.asarray(sums) / sizes
    between = float((sizes * (means - math.fsum(sums) / total) ** 2).sum()) / (num - 1)
    squares = math.fsum(value**2 for value in values) - float((sizes * means**2).sum())
    within = max(0.0, squares) / (total - num)
    usual = (total - float((sizes**2).sum()) / total) / (num - 1)
    variance = between + (usual - 1) * within
    return min(1.0, max(0.0, (between - within) / variance)) if variance > _NO_SPREAD else 1.0


def _usual_size(sizes: Sequence[int]) -> float:
    """Return the mean size, over problems, of the cluster that a problem belongs to."""
    return sum(size**2 for size in sizes) / sum(sizes)


def _compute_adjusted_mean(
    sums: Sequence[float], sizes: Sequence[int], least: float, most: float
) -> AdjustedMean:
    """Return the mean over clusters and two imaginary clusters, of values `least` and `most`."""
    size, num = _usual_size(sizes), len(sums) + 2
    total = sum(sizes) + 2 * size
    center = math.fsum([*sums, size * (least + most)]) / total
    residuals = [value - center * n for value, n in zip(sums, sizes, strict=True)]
    residuals += [size * (least - center), size * (most - center)]
    squares = math.fsum(value**2 for value in residuals)
    error = math.sqrt(squares * num / (num - 1)) / total
    return AdjustedMean(center, error, sum(sizes) / size + 1)


@lru_cache(maxsize=1 << 14)  # many problems have equal numbers of correct samples
def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that a random k of the samples contain a correct sample (pass@k).

    This is Chen et al.'s unbiased estimate 1 - C(n-c, k) / C(n, k) for draws without replacement,
    computed as a product so that nothing overflows.

    Args:
        num_samples: Samples of the problem, n.
        num_correct: Correct samples of the problem, c.
        k: Samples that are drawn, at least 1.

    Returns:
        The probability; NaN if there are fewer than k samples.
    """
    if not 0 <= num_correct <= num_samples:
        raise InputError(
            f"the number of correct samples must be from 0 to {num_samples}, got {num_correct}"
        )
    check_k(k)
    if num_samples < k:
        return math.nan
    if num_samples - num_correct < k:
        return 1.0
    upper = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / upper))


def check_k(k: int) -> None:
    """Raise InputError for a k that is not positive."""
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")
