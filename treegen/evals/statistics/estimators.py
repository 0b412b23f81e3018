"""Estimators over samples: pass@k, maj@k, and error bars whose unit is the problem."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError

# Student's t at 97.5%, in powers of 1 / degrees of freedom (Cornish and Fisher). The first is the
# normal distribution's. Right to 0.8% at 2 degrees, 0.1% at 3 and 0.01% from 5 on.
_T95: Final = (
    1.959963984540054,
    2.372271230298562,
    2.822498615739641,
    2.555849679507722,
    1.589534053393823,
)

_FloatArray = npt.NDArray[np.float64]

# Elements of an array of complex numbers that is made at a time.
_BLOCK: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, its standard error, and a 95% interval.

    value: the mean.
    stderr: its standard error; None for a single problem, which has no spread.
    low, high: the bounds of the interval.
    num_problems: problems that the mean is over.
    """

    value: float
    stderr: float | None
    low: float
    high: float
    num_problems: int


def estimate(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """Return the mean of per-problem values in [0, 1] with its error bars.

    Problems are independent draws. Samples of one problem are not, so each problem gives one value.
    See `mean_interval` for the interval.

    clusters: of each problem, where problems of one cluster are not independent. The standard error
    is then the cluster-robust one; see `standard_error`.

    Raises:
        InputError: there is no value, or one outside [0, 1].
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
    regression programs call cluster-robust (CR1). With each value a cluster of its own that is the
    usual s / sqrt(n).
    """
    num = len(values)
    mean = math.fsum(values) / num
    if clusters is None:
        squares = math.fsum((value - mean) ** 2 for value in values)
        return math.sqrt(squares / (num - 1) / num) if num > 1 else None
    sums: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums.setdefault(cluster, []).append(value - mean)
    if len(sums) < 2:
        return None
    squares = math.fsum(math.fsum(each) ** 2 for each in sums.values())
    return math.sqrt(squares * len(sums) / (len(sums) - 1)) / num


def mean_interval(
    values: Sequence[float],
    least: float,
    most: float,
    clusters: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """Return a 95% interval for the mean of problems whose values lie in [least, most].

    The adjusted t interval: Student's t interval over the problems and two imaginary ones, one
    with the least value and one with the most, cut to [least, most]. Adding one success and one
    failure is what Agresti and Caffo (2000) do for a difference of proportions and Bonett and Price
    (2012) for one of paired proportions; here values may be shares too. The two keep a width where
    all problems agree, and the interval moves little when the values do. A mean of right and wrong
    problems is covered at least 93.2% of the time, whatever their number and the mean (computed up
    to 1,000 problems). Clustered shares are simulated in tests/evals/test_stats.py.

    clusters: of each problem, where problems of one cluster are not independent. Then each of the
    two imaginary ones is a cluster, and the degrees of freedom are those of the clusters.
    """
    whole = (*values, least, most)
    # Names of the imaginary clusters that no other has.
    names = None if clusters is None else [*((name,) for name in clusters), least, most]
    num = len(whole) if names is None else len(set(names))
    center = math.fsum(whole) / len(whole)
    error = standard_error(whole, names)
    assert error is not None
    t95 = math.fsum(term / (num - 1) ** power for power, term in enumerate(_T95))
    half = t95 * error
    return max(least, center - half), min(most, center + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that k of the samples, drawn without replacement, hold a correct one.

    This is Chen et al.'s unbiased estimate 1 - C(n-c, k) / C(n, k), as a product so that nothing
    overflows. NaN if there are fewer than k samples.
    """
    if not 0 <= num_correct <= num_samples:
        raise InputError(f"{num_correct} correct of {num_samples} samples is not a count")
    _check_k(k)
    if num_samples < k:
        return math.nan
    if num_samples - num_correct < k:
        return 1.0
    upper = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / upper))


def maj_at_k(correct: Sequence[int], wrong: Sequence[int], invalid: int, k: int) -> float:
    """Return the chance that a vote among k of the samples is won by a correct answer.

    `correct` and `wrong` hold, for each distinct answer, how many samples gave it; `invalid`
    samples gave none. The k voters are a random subset without replacement, and the value is the
    exact expectation over all subsets. The answer with most votes wins. If several tie, each counts
    for its share, which is the mean of breaking the tie at random. An invalid sample has no vote
    but stays one of the k, and a subset without a valid answer is wrong. NaN if there are fewer
    than k samples.
    """
    sizes = _check_tally((*correct, *wrong), invalid, k)
    if sum(sizes) + invalid < k:
        return math.nan
    shares = []
    for size, repeats in Counter(size for size in correct if size).items():
        shares.append(repeats * _win(size, _without(sizes, size), invalid, k, True))
    return min(1.0, math.fsum(shares))


def tie_at_k(counts: Sequence[int], invalid: int, k: int) -> float:
    """Return the chance that a vote among k of the samples has no single winner.

    `counts` holds how many samples gave each distinct answer. A subset without any valid answer
    is no tie. NaN if there are fewer than k samples.
    """
    sizes = _check_tally(counts, invalid, k)
    num = sum(sizes) + invalid
    if num < k:
        return math.nan
    won = [math.comb(invalid, k) / math.comb(num, k)]
    for size, repeats in Counter(sizes).items():
        won.append(repeats * _win(size, _without(sizes, size), invalid, k, False))
    tie = 1.0 - math.fsum(won)
    # Rounding may leave a tiny chance of an impossible tie.
    return tie if tie > 1e-11 else 0.0


def _check_k(k: int) -> None:
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")


def _check_tally(counts: Sequence[int], invalid: int, k: int) -> tuple[int, ...]:
    _check_k(k)
    if invalid < 0 or any(count < 0 for count in counts):
        raise InputError("vote counts must not be negative")
    return tuple(count for count in counts if count)


def _without(sizes: Sequence[int], size: int) -> tuple[tuple[int, int], ...]:
    """Return (size, how many) for all answers but one of the given size."""
    others = Counter(sizes)
    others[size] -= 1
    return tuple(sorted((other, repeats) for other, repeats in others.items() if repeats))


@lru_cache(maxsize=1 << 16)
def _win(
    size: int, others: tuple[tuple[int, int], ...], invalid: int, k: int, share_ties: bool
) -> float:
    """Return the chance that an answer with `size` samples wins a vote of k.

    Drawing k of n samples without replacement is drawing Binomial(n_i, k/n) from each answer's
    n_i samples, given that the draws add up to k. So with j votes for our answer, the chance that
    no other answer has more is a coefficient of a product of small polynomials, one per answer:

        [x^(k-j)]  prod_i (sum_{a<j} b_i(a) x^a  +  y b_i(j) x^j)  *  (invalid: any number)

    where y counts the answers that tie. With t ties our share is 1/(1+t), the integral of y^t
    from 0 to 1, which Gauss-Legendre nodes give exactly; without shares, y = 0. The coefficient
    is read off from the values at roots of unity. The parameter k/n puts the mass at the
    coefficient wanted, so doubles are enough at any n.
    """
    num = size + invalid + sum(other * repeats for other, repeats in others)
    if k == num:
        top = max((other for other, _ in others), default=0)
        tied = sum(repeats for other, repeats in others if other == size)
        return 0.0 if size < top or (tied and not share_ties) else 1.0 / (1 + tied)
    if k == 1:
        return size / num
    rate = k / num
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num + 1)))])
    # A number of roots under which only coefficients beyond k + slack alias with the one wanted;
    # by a Chernoff bound those hold less than 1e-19.
    slack = 15 + math.ceil(math.sqrt(225 + 90 * k))
    num_roots = min(num, k + slack) + 1
    root = np.exp(2j * np.pi * np.arange(num_roots) / num_roots)
    most = min(size, k)
    weight = np.zeros((len(others), most + 1))
    for row, (other, _) in enumerate(others):
        weight[row, : min(other, most) + 1] = _binomial(log_factorial, other, rate)[: most + 1]
    repeats_D = np.array([repeats for _, repeats in others])
    own = _binomial(log_factorial, size, rate)
    free = (1 - rate + rate * root) ** invalid
    total = 0.0
    below = np.zeros((1, len(others), num_roots), dtype=np.complex128)
    # Votes of ours, j, in blocks: J of them at a time, so that arrays [J, A, R] stay small.
    block = max(1, _BLOCK // max(1, below.size))
    for start in range(0, most + 1, block):
        votes_J = np.arange(start, min(most + 1, start + block))
        turns_JR = root[np.outer(votes_J, np.arange(num_roots)) % num_roots]
        at_JAR = weight.T[votes_J][:, :, None] * turns_JR[:, None, :]
        upto = np.concatenate([below, at_JAR]).cumsum(axis=0)
        below_JAR, below = upto[:-1], upto[-1:]
        # At most one rival that ties needs one node, in the middle; without shares it is 0.
        middle = 0.5 if share_ties else 0.0
        product_JR = np.prod((below_JAR + middle * at_JAR) ** repeats_D[:, None], axis=1)
        for at, j in enumerate(votes_J.tolist()) if share_ties else ():
            rivals = int(sum(repeats for other, repeats in others if other >= j))
            if j and (degree := min(rivals, k // j - 1)) > 1:
                nodes, mass = _nodes(degree)
                factors = below_JAR[at, :, None] + nodes[:, None] * at_JAR[at, :, None]
                product_JR[at] = mass @ np.prod(factors ** repeats_D[:, None, None], axis=0)
        shift_JR = root[np.outer(votes_J - k, np.arange(num_roots)) % num_roots]
        coefficient_J = (product_JR * free * shift_JR).mean(axis=1).real
        for j, coefficient in zip(votes_J.tolist(), coefficient_J.tolist(), strict=True):
            if j:  # without a vote nobody wins
                total += float(own[j]) * coefficient
    return min(1.0, max(0.0, total / float(_binomial(log_factorial, num, rate)[k])))


def _binomial(log_factorial: _FloatArray, num: int, rate: float) -> _FloatArray:
    """Return the chances of 0 to num successes in num trials, [num + 1]."""
    hits = np.arange(num + 1)
    log_ways = log_factorial[num] - log_factorial[hits] - log_factorial[num - hits]
    chance: _FloatArray = np.exp(
        log_ways + hits * math.log(rate) + (num - hits) * math.log1p(-rate)
    )
    return chance


@lru_cache(maxsize=1024)
def _nodes(degree: int) -> tuple[_FloatArray, _FloatArray]:
    """Return nodes and weights that integrate polynomials of a degree over [0, 1] exactly."""
    nodes, mass = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, mass / 2
