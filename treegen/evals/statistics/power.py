"""Power analysis: how many problems and samples show a difference, or give a narrow interval.

The accuracy of a run is the mean over problems of the share of right samples. Its variance has two
parts: between problems, which only more problems reduce, and within problems, which more samples
reduce too (Miller 2024, "Adding Error Bars to Evals"). With n problems and k samples, the variance
of the difference between the accuracies of two runs is

    (2 (1 - correlation) between + 2 within / k) / n

where `correlation` is 0 unless both runs have the same problems. The variance of one accuracy is
(between + within / k) / n.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, arg, require_extra
from treegen.evals.statistics.estimators import AdjustedMean, adjusted_rows

_Floats = npt.NDArray[np.float64]

MOST_PROBLEMS: Final = 10**8
"""The largest number of problems in these computations."""
_MAX_SIMULATED_PROBLEMS: Final = 50  # problems up to which the power is simulated
_MAX_CORRECTED_PROBLEMS: Final = 2000  # problems beyond which the imaginary problems cost no power
_ROUNDS: Final = 2000
_VALUES: Final = 50_000  # values simulated for the width of intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances:
    """Variances of answers between and within problems."""

    between: float
    """The variance, over problems, of the probability p of a right sample."""
    within: float
    """The variance of a sample around the p of its problem: the mean of p (1 - p)."""
    correlation: float
    """The correlation of p between the two runs; 0 if the runs have different problems."""

    def __post_init__(self) -> None:
        for name in ("between", "within"):
            value = getattr(self, name)
            if not 0 <= value <= 0.25:
                raise InputError(
                    f"the variance {name} problems must be from 0 to 0.25, got {value}"
                )
        if not -1 <= self.correlation <= 1:
            raise InputError(f"the correlation must be from -1 to 1, got {self.correlation}")

    def of_difference(self, num_samples: int) -> float:
        """Return the variance of the difference between the runs on one problem.

        Args:
            num_samples: Samples of the problem in each run.
        """
        return 2 * (1 - self.correlation) * self.between + 2 * self.within / num_samples


def estimate_variances(rights: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return unbiased estimates of the variances between and within the problems of a run.

    Args:
        rights: (right samples, all samples) of each problem.

    Raises:
        InputError: there are fewer than two problems, or a problem has fewer than two samples.
    """
    if len(rights) < 2:
        raise InputError("variances need at least two problems")
    if any(num < 2 for _, num in rights):
        raise InputError(
            "the variance within problems cannot be estimated from one sample per problem; use "
            "a run with more samples, or with more repeats of each search, or pass "
            f"{arg('between=')} and {arg('within=')}"
        )
    shares = [right / num for right, num in rights]
    noise = [p * (1 - p) / (num - 1) for p, (_, num) in zip(shares, rights, strict=True)]
    within = [v * num for v, (_, num) in zip(noise, rights, strict=True)]
    mean = math.fsum(shares) / len(shares)
    variance = math.fsum((p - mean) ** 2 for p in shares) / (len(shares) - 1)
    between = max(0.0, variance - math.fsum(noise) / len(noise))
    return min(0.25, between), min(0.25, math.fsum(within) / len(within))


def correlation_of(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> float:
    """Return the correlation, between two runs, of the problems' probabilities of a right sample.

    The estimate corrects for the noise of sampling.

    Args:
        a: (right samples, all samples) of each problem in the first run.
        b: (right samples, all samples) of the same problems in the second run, in the same order.
    """
    (between_a, _), (between_b, _) = estimate_variances(a), estimate_variances(b)
    shares = [[right / num for right, num in run] for run in (a, b)]
    means = [math.fsum(shares_of_run) / len(shares_of_run) for shares_of_run in shares]
    products = ((x - means[0]) * (y - means[1]) for x, y in zip(*shares, strict=True))
    covariance = math.fsum(products) / (len(a) - 1)
    size = math.sqrt(between_a * between_b)
    return max(-1.0, min(1.0, covariance / size)) if size > 0 else 0.0


def power(
    spread: Variances, difference: float, num_problems: int, num_samples: int, alpha: float = 0.05
) -> float:
    """Return the probability that `treegen compare` finds a difference (two-sided power).

    The test is `adjusted_difference`, as in `treegen compare`. Its two imaginary problems cost
    power if there are few problems, and nothing if there are many. Up to 50 problems the power is
    therefore simulated: the probabilities of a right sample have Beta distributions with the given
    variances, joined by a Gaussian copula. Up to 2,000 problems the power follows from the
    noncentral t distribution, whose limits are widened by the ratio of simulated intervals to those
    of a paired t-test. Beyond that it is the power of the paired t-test. The simulation has a fixed
    seed, so equal arguments give equal results; with 2,000 rounds they are accurate to about 0.02.
    Variances that the difference excludes are limited by `limit_variances`.

    Args:
        spread: Variances of the answers.
        difference: Difference between the accuracies of the two runs.
        num_problems: Number of problems, the same in both runs.
        num_samples: Samples of each problem in each run.
        alpha: Probability of finding a difference if there is none.

    Returns:
        The probability, from 0 to 1.

    Raises:
        InputError: a value is out of range, or scipy is not installed.
    """
    _check(difference, num_samples, alpha)
    if not 2 <= num_problems <= MOST_PROBLEMS:
        raise InputError(f"a test needs 2 to {MOST_PROBLEMS:,} problems, got {num_problems!r:.40}")
    stats = _scipy()
    spread = limit_variances(spread, difference)
    if num_problems <= _MAX_SIMULATED_PROBLEMS:
        rows = _simulate_differences(spread, abs(difference), (_ROUNDS, num_problems), num_samples)
        center, error, freedom = adjusted_rows(rows)
        return float((np.abs(center) > stats.t.isf(alpha / 2, freedom) * error).mean())
    variance = spread.of_difference(num_samples)
    if variance <= 0:
        return 1.0
    freedom = num_problems - 1
    shift = abs(difference) / math.sqrt(variance / num_problems)
    limit = stats.t.isf(alpha / 2, freedom)
    if num_problems <= _MAX_CORRECTED_PROBLEMS:
        limit *= _compute_width_ratio(
            spread, math.ceil(50 * abs(difference)) / 50, num_problems, num_samples
        )
    probability = stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift)
    # scipy returns NaN for very large shifts; the test always finds these.
    return 1.0 if math.isnan(probability) else float(min(1.0, probability))


@lru_cache(maxsize=1 << 8)
def limit_variances(spread: Variances, difference: float) -> Variances:
    """Return the variances that two runs with this difference can have, closest to those given.

    If accuracies differ by d, the mean over both runs of accuracy (1 - accuracy), and therefore the
    sum of the variances, is at most (1 - d^2) / 4. Probabilities with different means cannot be
    correlated perfectly if they are Beta distributed: the limit is the correlation of equal ranks.

    Args:
        spread: Variances of the answers.
        difference: Difference between the accuracies of the two runs.
    """
    difference = abs(difference)
    max_variance = max(0.0, 1 - difference**2) / 4
    between = min(spread.between, max_variance)
    within = min(spread.within, max_variance - between)
    limited = replace(spread, between=between, within=within)
    quantiles, _ = _model(limited, difference)
    if min(np.ptp(of_run) for of_run in quantiles) <= 0:
        return limited
    normal = _draw_normal()[0]
    a, b = (_chances(normal, of_run) for of_run in quantiles)
    high = float(np.corrcoef(a, b)[0, 1])
    low = float(np.corrcoef(a, _chances(-normal, quantiles[1]))[0, 1])
    return replace(limited, correlation=min(max(spread.correlation, low), high))


@lru_cache(maxsize=1 << 10)
def _compute_width_ratio(
    spread: Variances, difference: float, num_problems: int, num_samples: int
) -> float:
    """Return the ratio of the width of adjusted intervals to those of Student's paired t-test."""
    rounds = max(50, _VALUES // num_problems)
    rows = _simulate_differences(spread, difference, (rounds, num_problems), num_samples)
    _, error, _ = adjusted_rows(rows)
    plain = float(rows.std(axis=1, ddof=1).mean()) / math.sqrt(num_problems)
    return float(error.mean()) / plain if plain > 0 else 1.0


def _simulate_differences(
    spread: Variances, difference: float, shape: tuple[int, int], num_samples: int
) -> _Floats:
    """Return simulated differences of the shares of right samples, [rounds, problems].

    Args:
        spread: Variances of the answers.
        difference: Difference between the accuracies of the two runs, at least 0.
        shape: Rounds and problems.
        num_samples: Samples of each problem in each run.
    """
    if spread.of_difference(num_samples) <= 0:
        return np.full(shape, min(difference, 1.0))
    quantiles, joint = _model(spread, difference)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, *shape))
    second = joint * first + math.sqrt(1 - joint**2) * second
    rows: _Floats = (
        rng.binomial(num_samples, _chances(second, quantiles[1]))
        - rng.binomial(num_samples, _chances(first, quantiles[0]))
    ) / num_samples
    return rows


@lru_cache(maxsize=1 << 8)
def _model(spread: Variances, difference: float) -> tuple[tuple[_Floats, _Floats], float]:
    """Return the quantiles of the probabilities in two runs, and the correlation of the copula.

    The accuracies of the runs are chosen to fit the variances, if possible: averaged over both
    runs, between + within = accuracy * (1 - accuracy).
    """
    half = min(difference, 1.0) / 2
    middle = 0.5 - math.sqrt(max(0.0, 0.25 - spread.between - spread.within - half**2))
    middle = max(middle, half)
    quantiles = _quantiles(spread, middle - half), _quantiles(spread, middle + half)
    return quantiles, _copula(quantiles, spread.correlation)


_GRID: Final = np.linspace(-5, 5, 1001)


def _quantiles(spread: Variances, mean: float) -> _Floats:
    """Return the quantiles of probabilities with this mean, at the normal scores of `_GRID`."""
    stats = _scipy()
    u = stats.norm.cdf(_GRID)
    if spread.between <= 0 or not 0 < mean < 1:
        return np.full(len(u), mean)
    strength = mean * (1 - mean) / spread.between - 1
    if strength <= 1e-3:  # every probability is 0 or 1
        return np.asarray(u > 1 - mean, dtype=np.float64)
    quantiles: _Floats = stats.beta.ppf(u, mean * strength, (1 - mean) * strength)
    return np.clip(quantiles, 0.0, 1.0)


def _chances(normal: _Floats, quantiles: _Floats) -> _Floats:
    chances: _Floats = np.interp(normal, _GRID, quantiles)
    return chances


@lru_cache(maxsize=1)
def _draw_normal() -> _Floats:
    """Return two independent rows of normal scores, for correlations."""
    scores = np.random.default_rng(1).standard_normal((2, 5_000))
    scores.flags.writeable = False
    return scores


def _copula(quantiles: Sequence[_Floats], correlation: float) -> float:
    """Find, by bisection, the correlation of normal scores that yields that of probabilities.

    Args:
        quantiles: Quantiles of the probabilities in both runs, at the normal scores of `_GRID`.
        correlation: Correlation of the probabilities.
    """
    first, noise = _draw_normal()
    a = _chances(first, quantiles[0])

    def of_chances(joint: float) -> float:
        b = _chances(joint * first + math.sqrt(1 - joint**2) * noise, quantiles[1])
        return float(np.corrcoef(a, b)[0, 1])

    if min(np.ptp(of_run) for of_run in quantiles) <= 0:
        return correlation
    low, high = -1.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if of_chances(middle) < correlation else (low, middle)
    return (low + high) / 2 if abs(correlation) < 1 else correlation


def problems_for(
    spread: Variances, difference: float, num_samples: int, wanted: float = 0.8, alpha: float = 0.05
) -> int:
    """Return the smallest number of problems with which the power is at least `wanted`.

    Args:
        spread: Variances of the answers.
        difference: Difference between the accuracies of the two runs.
        num_samples: Samples of each problem in each run.
        wanted: Required probability of finding the difference, above alpha and below 1.
        alpha: Probability of finding a difference if there is none.

    Raises:
        InputError: a value is out of range, or no number of problems is enough.
    """
    _check(difference, num_samples, alpha)
    if not alpha < wanted < 1:
        raise InputError(f"the power must be above alpha ({alpha}) and below 1, got {wanted}")
    too_many = InputError(
        f"detecting a difference of {difference} needs more than {MOST_PROBLEMS:,} problems; "
        "choose a larger difference"
    )
    low, high = 1, 2
    if spread.of_difference(num_samples) > 0:  # a paired t-test needs fewer problems: a lower bound
        normal = _scipy().norm
        away = normal.isf(alpha / 2) + normal.ppf(wanted)
        min_problems = spread.of_difference(num_samples) * (away / difference) ** 2
        if min_problems > MOST_PROBLEMS:
            raise too_many
        high = max(2, int(min_problems))
    while power(spread, difference, high, num_samples, alpha) < wanted:
        low, high = high, math.ceil(1.25 * high) + 1
        if high > MOST_PROBLEMS:
            raise too_many
    between = range(low + 1, high)
    index = bisect_left(
        between, wanted, key=lambda num: power(spread, difference, num, num_samples, alpha)
    )
    return low + 1 + index


def difference_for(
    spread: Variances, num_problems: int, num_samples: int, wanted: float = 0.8, alpha: float = 0.05
) -> float | None:
    """Return the smallest difference for which the power is at least `wanted`.

    Args:
        spread: Variances of the answers.
        num_problems: Number of problems, the same in both runs.
        num_samples: Samples of each problem in each run.
        wanted: Required probability of finding the difference, above alpha and below 1.
        alpha: Probability of finding a difference if there is none.

    Returns:
        The difference, to within 0.2%; None if so few problems do not even show a difference of 1.

    Raises:
        InputError: a value is out of range.
    """
    if not alpha < wanted < 1:
        raise InputError(f"the power must be above alpha ({alpha}) and below 1, got {wanted}")
    low, high = 0.0, 1.0
    if power(spread, high, num_problems, num_samples, alpha) < wanted:
        return None
    while high - low > 0.002 * high:
        middle = (low + high) / 2
        enough = power(spread, middle, num_problems, num_samples, alpha) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def predict_half_width(
    spread: Variances, mean: float, num_problems: int, num_samples: int
) -> float:
    """Return the distance from a mean to the farther end of its 95% interval.

    The interval is `estimators.mean_interval` of a run whose problems have exactly these variances.

    Args:
        spread: Variances of the answers; the correlation has no effect.
        mean: Accuracy of the run.
        num_problems: Number of problems.
        num_samples: Samples of each problem.
    """
    n = num_problems
    center = (n * mean + 1) / (n + 2)
    squares = (n - 1) * (spread.between + spread.within / num_samples) + n * (mean - center) ** 2
    squares += center**2 + (1 - center) ** 2  # the two imaginary problems
    adjusted = AdjustedMean(center, math.sqrt(squares / ((n + 1) * (n + 2))), n + 1.0)
    low, high = adjusted.interval(0.0, 1.0)
    return max(mean - low, high - mean)


def problems_for_half_width(
    spread: Variances, mean: float, num_samples: int, half_width: float
) -> int:
    """Return the smallest number of problems with at most this `predict_half_width`.

    Args:
        spread: Variances of the answers; the correlation has no effect.
        mean: Accuracy of the run.
        num_samples: Samples of each problem.
        half_width: Distance from the mean to the farther end of the interval.

    Raises:
        InputError: a value is out of range, or no number of problems is enough.
    """
    if not 0 < half_width < 1:
        raise InputError(f"{arg('half_width')} must be above 0 and below 1, got {half_width}")
    _check_samples(num_samples)
    numbers = range(1, MOST_PROBLEMS + 1)
    index = bisect_left(
        numbers,
        True,
        key=lambda num: predict_half_width(spread, mean, num, num_samples) <= half_width,
    )
    if index == len(numbers):
        raise InputError(
            f"a half width of {half_width} needs more than {MOST_PROBLEMS:,} problems; choose a "
            "larger one"
        )
    return numbers[index]


def _check_samples(num_samples: int) -> None:
    if num_samples < 1:
        raise InputError(f"there must be at least 1 sample per problem, got {num_samples}")


def _check(difference: float, num_samples: int, alpha: float) -> None:
    if not 0 < abs(difference) <= 1:
        raise InputError(f"the difference must be from -1 to 1 and not 0, got {difference}")
    _check_samples(num_samples)
    if not 0 < alpha < 1:
        raise InputError(f"{arg('alpha')} must be between 0 and 1, got {alpha}")


def _scipy() -> Any:
    with require_extra("power needs scipy", "report"):
        from scipy import stats
    return stats
