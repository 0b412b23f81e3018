"""maj@k: the chances of majority votes among random samples, over all subsets of k of them."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.evals.statistics.estimators import check_k

_FloatArray = npt.NDArray[np.float64]

# Up to so many samples, subsets are counted as integers, for all k at once.
_COUNTED: Final = 96
# Elements of an array of complex numbers that is made at a time.
_BLOCK: Final = 1 << 18


@check_argument_types
def maj_at_k(correct: Sequence[int], wrong: Sequence[int], invalid: int, k: int) -> float:
    """Return the chance that a vote among k of the samples is won by a correct answer.

    `correct` and `wrong` hold, for each distinct answer, how many samples gave it; `invalid`
    samples gave none. The k voters are a random subset without replacement, and the value is the
    exact expectation over all subsets. The answer with most votes wins. If several tie, each counts
    for its share, which is the mean of breaking the tie at random. An invalid sample has no vote
    but stays one of the k, and a subset without a valid answer is wrong. NaN if there are fewer
    than k samples.
    """
    check_k(k)
    num, candidates = _candidates(tuple(correct), tuple(wrong), invalid)
    if num < k:
        return math.nan
    shares = [repeats * _win(size, others, invalid, k) for size, repeats, others in candidates]
    return min(1.0, math.fsum(shares))


@check_argument_types
def tie_at_k(counts: Sequence[int], invalid: int, k: int) -> float:
    """Return the chance that a vote among k of the samples has no single winner.

    `counts` holds how many samples gave each distinct answer. A subset without any valid answer
    is no tie. NaN if there are fewer than k samples.
    """
    check_k(k)
    _check(counts, invalid)
    num = sum(counts) + invalid
    if num < k:
        return math.nan
    if num <= _COUNTED:
        _, single = _tops(0, _sizes(counts), invalid)
        return _tie(single, num, invalid, k)
    _, candidates = _candidates(tuple(counts), (), invalid)
    won = [math.comb(invalid, k) / math.comb(num, k)]
    for size, repeats, others in candidates:
        won.append(repeats * _win_probability_float(size, others, invalid, k, False))
    tie = 1.0 - math.fsum(won)
    # Rounding may leave a tiny chance of an impossible tie.
    return tie if tie > 1e-11 else 0.0


@lru_cache(maxsize=1 << 16)  # many problems have the counts of another one
def votes_at(
    correct: tuple[int, ...], wrong: tuple[int, ...], invalid: int, ks: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Return for each k what `maj_at_k` and `tie_at_k` do; the subsets are counted once for all."""
    num, candidates = _candidates(correct, wrong, invalid)
    if num > _COUNTED:
        counts = (*correct, *wrong)
        return tuple(
            (maj_at_k(correct, wrong, invalid, k), tie_at_k(counts, invalid, k)) for k in ks
        )
    own = candidates or ((0, 0, _sizes(wrong)),)
    tops = [(repeats, *_tops(size, others, invalid)) for size, repeats, others in own]
    found = []
    for k in ks:
        check_k(k)
        if num < k:
            found.append((math.nan, math.nan))
            continue
        won = [repeats * _share(wins, num, k) for repeats, wins, _ in tops]
        found.append((min(1.0, math.fsum(won)), _tie(tops[0][2], num, invalid, k)))
    return tuple(found)


_Sizes = tuple[tuple[int, int], ...]
"""How many answers have how many samples: (samples, answers), from few samples to many."""


@lru_cache(maxsize=1 << 14)  # votes of several k are of the same counts
def _candidates(
    correct: tuple[int, ...], wrong: tuple[int, ...], invalid: int
) -> tuple[int, tuple[tuple[int, int, _Sizes], ...]]:
    """Return the number of samples, and of the correct answers (size, how many, the others)."""
    counts = (*correct, *wrong)
    _check(counts, invalid)
    sizes = tuple(count for count in counts if count)
    found = sorted(Counter(size for size in correct if size).items())
    candidates = tuple((size, repeats, _without(sizes, size)) for size, repeats in found)
    return sum(sizes) + invalid, candidates


def _check(counts: Sequence[int], invalid: int) -> None:
    if min(counts, default=0) < 0 or invalid < 0:
        raise InputError("vote counts must not be negative")


def _sizes(counts: Sequence[int]) -> _Sizes:
    return tuple(sorted(Counter([count for count in counts if count]).items()))


def _without(sizes: Sequence[int], size: int) -> _Sizes:
    """Return (size, how many) for all answers but one of the given size."""
    others = Counter(sizes)
    others[size] -= 1
    return tuple(sorted([(other, repeats) for other, repeats in others.items() if repeats]))


def _win(size: int, others: _Sizes, invalid: int, k: int) -> float:
    """Return the chance that an answer with `size` samples wins a vote of k, ties by their shares.

    Args:
        others: (size, how many) of the other answers.
    """
    num = size + invalid + sum(other * repeats for other, repeats in others)
    if num > _COUNTED:
        return _win_probability_float(size, others, invalid, k, True)
    if k == num:
        tied = sum(repeats for other, repeats in others if other == size)
        return 0.0 if any(other > size for other, _ in others) else 1.0 / (1 + tied)
    return _share(_tops(size, others, invalid)[0], num, k)


def _share(wins: Sequence[int], num: int, k: int) -> float:
    """Return the chance to win, ties by their shares. wins: as `_tops` counts them."""
    shares = [_coefficient(way, num, k) / (1 + tied) for tied, way in enumerate(wins)]
    return math.fsum(shares) / math.comb(num, k)


def _tie(single: int, num: int, invalid: int, k: int) -> float:
    """Return the chance of a tie. single: the subsets without one, as `_tops` counts them."""
    every = math.comb(num, k)
    return (every - math.comb(invalid, k) - _coefficient(single, num, k)) / every


def _coefficient(packed: int, num: int, k: int) -> int:
    """Return the coefficient of x^k where x is 2^(num + 1)."""
    return (packed >> k * (num + 1)) & ((1 << (num + 1)) - 1)


@lru_cache(maxsize=1 << 14)
def _tops(size: int, others: _Sizes, invalid: int) -> tuple[tuple[int, ...], int]:
    """Return in how many subsets of k samples an answer is at the top with 0, 1, ... others.

    Beside them: in how many one answer is at the top alone, whichever it is. Each number holds the
    counts of all k: those of k in num + 1 bits from bit k * (num + 1) on. A subset whose most votes
    are j is counted by a coefficient of a product of polynomials, one for each answer i:

        prod_i (sum_{a<j} C(n_i, a) x^a  +  y C(n_i, j) x^j)  (1 + x)^invalid

    where y counts the answers at the top. With x = 2^(num + 1) a polynomial is an integer, none of
    whose coefficients carries, as all samples have less than 2^(num + 1) subsets.
    """
    rest = sum([other * repeats for other, repeats in others])
    width = size + rest + invalid + 1
    top = others[-1][0] if others else 0
    # With more votes than any other answer has samples, ours is alone at the top.
    single = _below(size, size + 1, width) - _below(size, min(top, size) + 1, width)
    single *= _below(rest + invalid, rest + invalid + 1, width)
    found = [single]
    for votes in range(1, top + 1):
        # Answers with fewer samples may have any votes, of n samples (1 + x)^n.
        rivals = [other for other in others if other[0] >= votes]
        free = invalid + rest - sum([other * repeats for other, repeats in rivals])
        shift = votes * width
        if votes > size:
            single += _alone(rivals, free + size, votes, width)
            continue
        terms = [_below(free, free + 1, width)]  # of y^i x^(i * votes)
        for other, repeats in rivals:
            below, at = _below(other, votes, width), math.comb(other, votes)
            for _ in range(repeats):
                more = [term * at for term in terms]
                terms = [term * below for term in terms]
                for tied in range(len(more) - 1):
                    terms[tied + 1] += more[tied]
                terms.append(more[-1])
        found += [0] * (len(terms) - len(found))
        ways = math.comb(size, votes)
        for tied, term in enumerate(terms, 1):
            found[tied - 1] += term * ways << tied * shift
        # Ours is alone at the top, or it has less and another one is.
        single += (terms[0] * ways + terms[1] * _below(size, votes, width)) << shift
    return tuple(found), single


def _alone(rivals: Sequence[tuple[int, int]], free: int, votes: int, width: int) -> int:
    """Return the coefficient of y in the product of `_tops`. free: samples that may all vote."""
    none, one = _below(free, free + 1, width), 0
    for size, repeats in rivals:
        below = _below(size, votes, width)
        at = repeats * math.comb(size, votes) << votes * width
        fewer = below ** (repeats - 1)
        none, one = none * fewer * below, (one * below + none * at) * fewer
    return one


@lru_cache(maxsize=1 << 14)
def _below(size: int, votes: int, width: int) -> int:
    """Return the sum of C(size, a) x^a over a < votes, where x is 2^width."""
    return sum(math.comb(size, a) << a * width for a in range(min(votes, size + 1)))


@lru_cache(maxsize=1 << 14)
def _win_probability_float(
    size: int, others: _Sizes, invalid: int, k: int, share_ties: bool
) -> float:
    """Return what `_win` does, in doubles: right to about 1e-12 at any number of samples.

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
    # A number of roots under which only coefficients beyond k + slack alias with the one wanted;
    # by a Chernoff bound those hold less than 1e-19.
    slack = 15 + math.ceil(math.sqrt(225 + 90 * k))
    num_roots = min(num, k + slack) + 1
    root = _roots(num_roots)
    most = min(size, k)
    weight = np.zeros((len(others), most + 1))
    for row, (other, _) in enumerate(others):
        weight[row, : min(other, most) + 1] = _binomial(other, rate)[: most + 1]
    repeats_D = np.array([repeats for _, repeats in others])
    own = _binomial(size, rate)
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
    return min(1.0, max(0.0, total / float(_binomial(num, rate)[k])))


@lru_cache(maxsize=1024)
def _log_factorials(num: int) -> _FloatArray:
    """Return the logarithms of 0! to num!, [num + 1]."""
    found: _FloatArray = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num + 1)))])
    return found


@lru_cache(maxsize=4096)
def _binomial(num: int, rate: float) -> _FloatArray:
    """Return the chances of 0 to num successes in num trials, [num + 1]."""
    log_factorial = _log_factorials(num)
    hits = np.arange(num + 1)
    log_ways = log_factorial[num] - log_factorial[hits] - log_factorial[num - hits]
    chance: _FloatArray = np.exp(
        log_ways + hits * math.log(rate) + (num - hits) * math.log1p(-rate)
    )
    return chance


@lru_cache(maxsize=1024)
def _roots(num: int) -> npt.NDArray[np.complex128]:
    """Return the roots of unity, [num]."""
    found: npt.NDArray[np.complex128] = np.exp(2j * np.pi * np.arange(num) / num)
    return found


@lru_cache(maxsize=1024)
def _nodes(degree: int) -> tuple[_FloatArray, _FloatArray]:
    """Return nodes and weights that integrate polynomials of a degree over [0, 1] exactly."""
    nodes, mass = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, mass / 2
