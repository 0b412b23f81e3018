"""How reliably samples are right, pass^k and G-Pass@k, and how many votes a jury is worth."""

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError
from treegen.evals.statistics.estimators import AdjustedMean, Estimate, check_k

THRESHOLDS: Final = (0.5, 0.75)
"""The shares of right samples of the reported G-Pass@k; a share of 1 is pass^k."""


@lru_cache(maxsize=1 << 14)  # many problems have equal numbers of correct samples
def g_pass_at_k(num_samples: int, num_correct: int, k: int, share: float) -> float:
    """Return the probability that at least a share of a random k of the samples is right.

    This is the unbiased estimate of Liu et al. (2024), "Are Your LLMs Capable of Stable
    Reasoning?": the tail of a hypergeometric distribution. A share near 0 gives pass@k, and 1 gives
    pass^k, the estimate C(c, k) / C(n, k) of Yao et al. (2024), tau-bench.

    Args:
        num_samples: Samples of the problem, n.
        num_correct: Right samples of the problem, c.
        k: Samples that are drawn, at least 1.
        share: The share, above 0 and at most 1.

    Returns:
        The probability; NaN if there are fewer than k samples.

    Raises:
        InputError: a number is out of its bounds.
    """
    check_k(k)
    if not 0 <= num_correct <= num_samples:
        raise InputError(
            f"the number of correct samples must be from 0 to {num_samples}, got {num_correct}"
        )
    if not 0 < share <= 1:
        raise InputError(f"the share must be above 0 and at most 1, got {share}")
    if num_samples < k:
        return math.nan
    min_right = max(1, math.ceil(share * k - 1e-9))  # 0.1 * 30 is 3.0000000000000004
    wrong = num_samples - num_correct
    ways = sum(
        math.comb(num_correct, right) * math.comb(wrong, k - right)
        for right in range(min_right, k + 1)
    )
    return ways / math.comb(num_samples, k)


def mean_g_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return mG-Pass@k: 2 / k times the sum of G-Pass@k over shares above one half, for k from 2.

    As published, the sum is over the shares i / k with i above ceil(k / 2). It is the mean of these
    values for even k; for odd k it stays below 1 even if all samples are right. It equals 2 / k
    times the mean of max(0, x - ceil(k / 2)), where x of k drawn samples are right.

    Args:
        num_samples: Samples of the problem.
        num_correct: Right samples of the problem.
        k: Samples that are drawn, at least 2.

    Returns:
        The value; NaN if there are fewer than k samples.
    """
    if math.isnan(g_pass_at_k(num_samples, num_correct, k, 1.0)):  # checks the arguments too
        return math.nan
    half, wrong = math.ceil(k / 2), num_samples - num_correct
    ways = sum(
        (right - half) * math.comb(num_correct, right) * math.comb(wrong, k - right)
        for right in range(max(half + 1, k - wrong), min(k, num_correct) + 1)
    )
    return 2 * ways / (k * math.comb(num_samples, k))


def reliability_values(counts: Sequence[tuple[int, int]], k: int) -> Mapping[str, list[float]]:
    """Return the values of each problem, by the name of the metric.

    Args:
        counts: For each problem, the numbers of all samples and of right samples.
        k: Samples that are drawn, at least 1.
    """
    metrics = {f"pass^{k}": [g_pass_at_k(num, right, k, 1.0) for num, right in counts]}
    if k > 1:
        for share in THRESHOLDS:
            values = [g_pass_at_k(num, right, k, share) for num, right in counts]
            metrics[f"G-Pass@{k}_{share:g}"] = values
        metrics[f"mG-Pass@{k}"] = [mean_g_pass_at_k(num, right, k) for num, right in counts]
    return metrics


def effective_votes(
    errors: Sequence[Sequence[float]], clusters: Sequence[Hashable]
) -> Estimate | None:
    """Return how many independent judges would err as little as the mean of these judges.

    It is the mean variance of one judge's error over the variance of the jury's error (Kish's
    design effect): the number of judges if their errors are independent, 1 if all err alike, apart
    from a bias that all judges share: it is no part of a variance. Both variances are unbiased,
    with answers as the unit. The interval is the jackknife over clusters of the logarithm of the
    ratio, by Student's t.

    Args:
        errors: For each answer, each judge's value minus the label.
        clusters: The problem of each answer.

    Returns:
        The number; None with fewer than two judges or three problems, or if the jury never errs
        differently.
    """
    table = np.asarray(errors, dtype=np.float64)
    names = np.unique(np.asarray([str(cluster) for cluster in clusters]), return_inverse=True)[1]
    num = int(names.max()) + 1 if len(names) else 0
    if table.ndim != 2 or table.shape[1] < 2 or num < 3:
        return None
    # The ratio without a cluster follows from sums of squares, so each answer is read once. The
    # means are subtracted first, because sums of squares of far values lose digits.
    centred = np.column_stack([table - table.mean(axis=0), table.mean(axis=1) - table.mean()])
    counts, sums, squares = _sums(centred, names, num)
    size, total, total_squares = float(len(table)), sums.sum(axis=0), squares.sum(axis=0)
    full_ratio = _variance_ratio(size, total, total_squares)
    if full_ratio is None:
        return None
    jackknife_ratios = [
        _variance_ratio(size - counts[i], total - sums[i], total_squares - squares[i])
        for i in range(num)
    ]
    ratios = [math.log(ratio) for ratio in jackknife_ratios if ratio is not None]
    if len(ratios) < num:
        return None
    mean = math.fsum(ratios) / num
    error = math.sqrt(math.fsum((ratio - mean) ** 2 for ratio in ratios) * (num - 1) / num)
    interval = AdjustedMean(math.log(full_ratio), error, max(2.0, num - 1))
    low, high = interval.interval(-math.inf, math.inf)
    return Estimate(full_ratio, error * full_ratio, math.exp(low), math.exp(high), num)


def _sums(
    table: npt.NDArray[np.float64], names: npt.NDArray[np.intp], num: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the rows of each cluster, their sums and their sums of squares.

    Args:
        table: The rows.
        names: The cluster of each row, from 0.
        num: The number of clusters.
    """
    sums, squares = np.zeros((2, num, table.shape[1]))
    np.add.at(sums, names, table)
    np.add.at(squares, names, table**2)
    return np.bincount(names, minlength=num).astype(np.float64), sums, squares


def _variance_ratio(
    num: float, sums: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
) -> float | None:
    """Return the mean variance of a judge over the variance of the jury; None without spread.

    Args:
        num: The number of answers.
        sums: For each judge and, last, their mean: the sum over answers.
        squares: The sum of squares over answers.
    """
    if num < 2:
        return None
    variances = (squares - sums**2 / num) / (num - 1)
    single, together = float(variances[:-1].mean()), float(variances[-1])
    return single / together if together > 1e-12 and single > 1e-12 else None
