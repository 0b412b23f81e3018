"""How many problems and samples it takes to see a difference between two runs.

The accuracy of a run is a mean over problems of shares of right samples. Its variance has two
parts: between problems, which only more problems make smaller, and within problems, which more
samples make smaller too (Miller 2024, "Adding Error Bars to Evals"). For runs of the same problems
what counts between problems is how much the difference varies: 2 (1 - correlation) of the variance
between problems. With n problems and k samples the variance of the difference of the means is

    (2 (1 - correlation) between + 2 within / k) / n

and the test is the one that `treegen compare` uses, `adjusted_difference`. Its two imaginary
problems cost power where problems are few, and nothing where they are many. So the power is
simulated up to 50 problems: chances of a right sample are Beta distributed, with the given
variances, and joined by a Gaussian copula. Up to 2,000 problems the noncentral t distribution gives
the power, with limits that are wider by as much as simulated intervals are wider than those of a
paired t-test. Beyond that it is the power of the paired t-test. The simulation is seeded, so the
same question has the same answer; with 2,000 rounds it is right to about 0.02.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, install
from treegen.evals.statistics.estimators import adjusted_rows

_Floats = npt.NDArray[np.float64]

_MOST: Final = 10**8  # problems
_FEW: Final = 50  # problems, up to which all is simulated
_MANY: Final = 2000  # problems, beyond which imaginary ones cost nothing
_ROUNDS: Final = 2000
_VALUES: Final = 50_000  # simulated for the width of intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances:
    """How much answers vary.

    between: the variance of problems' chances of a right sample.
    within: the variance of a sample about its problem's chance: the mean of p (1 - p).
    correlation: between the chances of one problem in both runs; 0 for runs of other problems.
    """

    between: float
    within: float
    correlation: float

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
        """Return the variance of one problem's difference. num_samples: of each run."""
        return 2 * (1 - self.correlation) * self.between + 2 * self.within / num_samples


def estimate_variances(rights: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the variances between and within the problems of a run, both without bias.

    Args:
        rights: For each problem, its right samples and all its samples.

    Raises:
        InputError: there are fewer than two problems, or one has fewer than two samples.
    """
    if len(rights) < 2:
        raise InputError("variances need at least two problems")
    if any(num < 2 for _, num in rights):
        raise InputError(
            "a run with one sample per problem does not tell how samples of a problem vary; "
            "use a run with more, or give between= and within="
        )
    shares = [right / num for right, num in rights]
    noise = [p * (1 - p) / (num - 1) for p, (_, num) in zip(shares, rights, strict=True)]
    within = [each * num for each, (_, num) in zip(noise, rights, strict=True)]
    mean = math.fsum(shares) / len(shares)
    variance = math.fsum((p - mean) ** 2 for p in shares) / (len(shares) - 1)
    between = max(0.0, variance - math.fsum(noise) / len(noise))
    return min(0.25, between), min(0.25, math.fsum(within) / len(within))


def correlation_of(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> float:
    """Return the correlation of problems' chances in two runs, free of the noise of samples.

    Args:
        a: As in `estimate_variances`, of the same problems in the same order.
        b: As in `estimate_variances`, of the same problems in the same order.
    """
    (between_a, _), (between_b, _) = estimate_variances(a), estimate_variances(b)
    shares = [[right / num for right, num in run] for run in (a, b)]
    means = [math.fsum(each) / len(each) for each in shares]
    products = ((x - means[0]) * (y - means[1]) for x, y in zip(*shares, strict=True))
    covariance = math.fsum(products) / (len(a) - 1)
    size = math.sqrt(between_a * between_b)
    return max(-1.0, min(1.0, covariance / size)) if size > 0 else 0.0


def power(
    spread: Variances, difference: float, num_problems: int, num_samples: int, alpha: float = 0.05
) -> float:
    """Return the chance that `treegen compare` finds a difference, two-sided.

    Args:
        spread: how much answers vary.
        difference: between the accuracies of the two runs.
        num_problems: problems of both runs.
        num_samples: samples of each problem, of each run.
        alpha: the chance to find a difference where there is none.

    Returns:
        The chance, from 0 to 1.

    Raises:
        InputError: a value is out of range, or scipy is not installed.
    """
    _check(difference, num_samples, alpha)
    if num_problems < 2:
        raise InputError(f"a test needs at least 2 problems, got {num_problems}")
    stats = _scipy()
    if num_problems <= _FEW:
        rows = _simulate_differences(spread, abs(difference), (_ROUNDS, num_problems), num_samples)
        center, error, freedom = adjusted_rows(rows)
        return float((np.abs(center) > stats.t.isf(alpha / 2, freedom) * error).mean())
    variance = spread.of_difference(num_samples)
    if variance <= 0:
        return 1.0
    freedom = num_problems - 1
    shift = abs(difference) / math.sqrt(variance / num_problems)
    limit = stats.t.isf(alpha / 2, freedom)
    if num_problems <= _MANY:
        limit *= _wider(spread, math.ceil(50 * abs(difference)) / 50, num_problems, num_samples)
    found = stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift)
    # Far out the tails are not numbers; a shift so large is always found.
    return 1.0 if math.isnan(found) else float(min(1.0, found))


@lru_cache(maxsize=1 << 10)
def _wider(spread: Variances, difference: float, num_problems: int, num_samples: int) -> float:
    """Return how much wider adjusted intervals are than those of Student's paired t-test."""
    rounds = max(50, _VALUES // num_problems)
    rows = _simulate_differences(spread, difference, (rounds, num_problems), num_samples)
    _, error, _ = adjusted_rows(rows)
    plain = float(rows.std(axis=1, ddof=1).mean()) / math.sqrt(num_problems)
    return float(error.mean()) / plain if plain > 0 else 1.0


def _simulate_differences(
    spread: Variances, difference: float, shape: tuple[int, int], num_samples: int
) -> _Floats:
    """Return simulated differences of shares; one row for each round."""
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
    """Return the quantiles of the chances in two runs, and the correlation that joins them.

    The accuracies of the runs fit the variances, if any do: in the mean of both runs, between +
    within = accuracy * (1 - accuracy).
    """
    half = min(difference, 1.0) / 2
    middle = 0.5 - math.sqrt(max(0.0, 0.25 - spread.between - spread.within - half**2))
    middle = max(middle, half)
    quantiles = _quantiles(spread, middle - half), _quantiles(spread, middle + half)
    return quantiles, _copula(quantiles, spread.correlation)


_GRID: Final = np.linspace(-5, 5, 1001)


def _quantiles(spread: Variances, mean: float) -> _Floats:
    """Return the quantiles of chances with a mean, at the normal scores of `_GRID`."""
    stats = _scipy()
    u = stats.norm.cdf(_GRID)
    if spread.between <= 0 or not 0 < mean < 1:
        return np.full(len(u), mean)
    strength = mean * (1 - mean) / spread.between - 1
    if strength <= 1e-3:  # every chance is 0 or 1
        return np.asarray(u > 1 - mean, dtype=np.float64)
    found: _Floats = stats.beta.ppf(u, mean * strength, (1 - mean) * strength)
    return np.clip(found, 0.0, 1.0)


def _chances(normal: _Floats, quantiles: _Floats) -> _Floats:
    found: _Floats = np.interp(normal, _GRID, quantiles)
    return found


def _copula(quantiles: Sequence[_Floats], correlation: float) -> float:
    """Return the correlation of normal scores that gives the chances theirs, by bisection."""
    first, own = np.random.default_rng(1).standard_normal((2, 5_000))
    a = _chances(first, quantiles[0])

    def of_chances(joint: float) -> float:
        b = _chances(joint * first + math.sqrt(1 - joint**2) * own, quantiles[1])
        return float(np.corrcoef(a, b)[0, 1])

    if min(np.ptp(each) for each in quantiles) <= 0:
        return correlation
    low, high = -1.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if of_chances(middle) < correlation else (low, middle)
    return (low + high) / 2 if abs(correlation) < 1 else correlation


def problems_for(
    spread: Variances, difference: float, num_samples: int, wanted: float = 0.8, alpha: float = 0.05
) -> int:
    """Return the fewest problems with which the chance to find a difference is as wanted.

    Raises:
        InputError: a value is out of range, or no number of problems is enough.
    """
    if not alpha < wanted < 1:
        raise InputError(f"the power must be above alpha ({alpha}) and below 1, got {wanted}")
    low, high = 1, 2
    if spread.of_difference(num_samples) > 0:  # what a paired t-test would need is less
        normal = _scipy().norm
        away = normal.isf(alpha / 2) + normal.ppf(wanted)
        least = spread.of_difference(num_samples) * (away / difference) ** 2
        if least > _MOST:
            raise InputError(
                f"more than {_MOST:,} problems are needed for {difference}; "
                "ask for a larger difference"
            )
        high = max(2, int(least))
    while power(spread, difference, high, num_samples, alpha) < wanted:
        low, high = high, math.ceil(1.25 * high) + 1
        if high > _MOST:
            raise InputError(
                f"more than {_MOST:,} problems are needed for {difference}; "
                "ask for a larger difference"
            )
    while high - low > 1:
        middle = (low + high) // 2
        enough = power(spread, difference, middle, num_samples, alpha) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def difference_for(
    spread: Variances, num_problems: int, num_samples: int, wanted: float = 0.8, alpha: float = 0.05
) -> float | None:
    """Return the smallest difference that is found with the chance that is wanted.

    Args:
        spread: how much answers vary.
        num_problems: problems of both runs.
        num_samples: samples of each problem, of each run.
        wanted: the chance to find the difference.
        alpha: the chance to find one where there is none.

    Returns:
        The difference; None if so few problems show none, not even one of 1.

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


def _check(difference: float, num_samples: int, alpha: float) -> None:
    if not 0 < abs(difference) < math.inf:
        raise InputError(f"the difference must be a number other than 0, got {difference}")
    if num_samples < 1:
        raise InputError(f"there must be at least 1 sample per problem, got {num_samples}")
    if not 0 < alpha < 1:
        raise InputError(f"alpha must be between 0 and 1, got {alpha}")


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise InputError(f"power needs scipy; install it with: {install('report')}") from None
    return stats
