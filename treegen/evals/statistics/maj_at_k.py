"""maj@k: exact probabilities of majority votes, over all subsets of k samples."""

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

# Up to this many samples, subsets are counted exactly as integers, for all k at once.
_COUNTED: Final = 96
# Elements of the arrays of complex numbers in one block.
_BLOCK: Final = 1 << 18


@check_argument_types
def maj_at_k(correct: Sequence[int], wrong: Sequence[int], invalid: int, k: int) -> float:
    """Return the probability that a correct answer wins a vote among k of the samples.

    The k voters are a random subset without replacement, and the value is the exact expectation
    over all subsets. The answer with the most votes wins. If several answers tie, each counts for
    its share, which is the expectation of breaking the tie at random. An invalid sample has no vote
    but is still one of the k, and a subset without a valid answer is wrong.

    Args:
        correct: For each distinct correct answer, how many samples gave it.
        wrong: For each distinct wrong answer, how many samples gave it.
        invalid: Samples without a valid answer.
        k: Samples in a vote, at least 1.

    Returns:
        The probability; NaN if there are fewer than k samples.
    """
    check_k(k)
    num, candidates = _candidates(tuple(correct), tuple(wrong), invalid)
    if num <= _COUNTED:
        return votes_at(tuple(correct), tuple(wrong), invalid, (k,))[0][0]
    if num < k:
        return math.nan
    shares = [
        repeats * _win_probability_float(size, other_sizes, invalid, k, True)
        for size, repeats, other_sizes in candidates
    ]
    return min(1.0, math.fsum(shares))


@check_argument_types
def tie_at_k(counts: Sequence[int], invalid: int, k: int) -> float:
    """Return the probability that a vote among k of the samples has no single winner.

    A subset without any valid answer is not a tie.

    Args:
        counts: For each distinct answer, how many samples gave it.
        invalid: Samples without a valid answer.
        k: Samples in a vote, at least 1.

    Returns:
        The probability; NaN if there are fewer than k samples.
    """
    check_k(k)
    num, candidates = _candidates(tuple(counts), (), invalid)
    if num <= _COUNTED:
        return votes_at((), tuple(counts), invalid, (k,))[0][1]
    if num < k:
        return math.nan
    won = [math.comb(invalid, k) / math.comb(num, k)]
    for size, repeats, other_sizes in candidates:
        won.append(repeats * _win_probability_float(size, other_sizes, invalid, k, False))
    tie = 1.0 - math.fsum(won)
    # Rounding may leave a tiny probability of an impossible tie.
    return tie if tie > 1e-11 else 0.0


@lru_cache(maxsize=1 << 16)  # many problems have equal counts
def votes_at(
    correct: tuple[int, ...], wrong: tuple[int, ...], invalid: int, ks: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Return `maj_at_k` and `tie_at_k` for each k, counting the subsets once for all k.

    Args:
        correct: For each distinct correct answer, how many samples gave it.
        wrong: For each distinct wrong answer, how many samples gave it.
        invalid: Samples without a valid answer.
        ks: Samples in a vote, each at least 1.
    """
    num, candidates = _candidates(correct, wrong, invalid)
    if num > _COUNTED:
        counts = (*correct, *wrong)
        return tuple(
            (maj_at_k(correct, wrong, invalid, k), tie_at_k(counts, invalid, k)) for k in ks
        )
    answers = candidates or ((0, 0, _sizes(wrong)),)
    tops = [
        (repeats, *_count_wins(size, other_sizes, invalid))
        for size, repeats, other_sizes in answers
    ]
    results = []
    for k in ks:
        check_k(k)
        if num < k:
            results.append((math.nan, math.nan))
            continue
        won = [repeats * _share(wins, num, k) for repeats, wins, _ in tops]
        results.append((min(1.0, math.fsum(won)), _tie(tops[0][2], num, invalid, k)))
    return tuple(results)


_Sizes = tuple[tuple[int, int], ...]
"""Pairs (samples, answers): how many answers have that many samples; in ascending order."""


@lru_cache(maxsize=1 << 14)  # votes of several k have the same counts
def _candidates(
    correct: tuple[int, ...], wrong: tuple[int, ...], invalid: int
) -> tuple[int, tuple[tuple[int, int, _Sizes], ...]]:
    """Return the number of samples, and the correct answers by size.

    Returns:
        The number of samples, and for each size of a correct answer: the size, how many correct
        answers have it, and the sizes of all answers except one of that size.
    """
    counts = (*correct, *wrong)
    _check(counts, invalid)
    sizes = tuple(count for count in counts if count)
    sizes_of_correct = sorted(Counter(size for size in correct if size).items())
    candidates = tuple(
        (size, repeats, _remove_answer(sizes, size)) for size, repeats in sizes_of_correct
    )
    return sum(sizes) + invalid, candidates


def _check(counts: Sequence[int], invalid: int) -> None:
    if min(counts, default=0) < 0 or invalid < 0:
        raise InputError("vote counts must not be negative")


def _sizes(counts: Sequence[int]) -> _Sizes:
    return tuple(sorted(Counter([count for count in counts if count]).items()))


def _remove_answer(sizes: Sequence[int], size: int) -> _Sizes:
    """Return (size, number of answers) pairs of all answers except one of the given size."""
    remaining = Counter(sizes)
    remaining[size] -= 1
    return tuple(sorted([(other, repeats) for other, repeats in remaining.items() if repeats]))


def _share(wins: Sequence[int], num: int, k: int) -> float:
    """Return the probability of winning; a tie counts for its share.

    Args:
        wins: The subsets that `_count_wins` counts, by the number of tied rivals.
        num: All samples.
        k: Samples in a vote.
    """
    shares = [_coefficient(way, num, k) / (1 + tied) for tied, way in enumerate(wins)]
    return math.fsum(shares) / math.comb(num, k)


def _tie(single: int, num: int, invalid: int, k: int) -> float:
    """Return the probability of a tie.

    Args:
        single: The subsets with a single winner, as `_count_wins` counts them.
        num: All samples.
        invalid: Samples without a valid answer.
        k: Samples in a vote.
    """
    every = math.comb(num, k)
    return (every - math.comb(invalid, k) - _coefficient(single, num, k)) / every


def _coefficient(packed: int, num: int, k: int) -> int:
    """Return the coefficient of x^k in an integer that packs a polynomial with x = 2^(num + 1)."""
    return (packed >> k * (num + 1)) & ((1 << (num + 1)) - 1)


@lru_cache(maxsize=1 << 14)
def _count_wins(size: int, other_sizes: _Sizes, invalid: int) -> tuple[tuple[int, ...], int]:
    """Count the subsets of k samples in which an answer has the most votes, by the number of ties.

    Each returned integer packs the counts of all k: the count of k is in num + 1 bits from bit
    k * (num + 1). A coefficient of a product of polynomials, one for each answer i, counts the
    subsets whose largest number of votes is j:

        prod_i (sum_{a<j} C(n_i, a) x^a  +  y C(n_i, j) x^j)  (1 + x)^invalid

    where y counts the answers with j votes. With x = 2^(num + 1) a polynomial is an integer, and no
    coefficient carries, because num samples have fewer than 2^(num + 1) subsets.

    Args:
        size: Samples that gave the answer; 0 to count only the second result.
        other_sizes: (size, number of answers) pairs of the other answers.
        invalid: Samples without a valid answer.

    Returns:
        The subsets in which the answer ties with 0, 1, ... other answers for the most votes, and
        the subsets in which any answer has the most votes alone.
    """
    num_others = sum([other * repeats for other, repeats in other_sizes])
    width = size + num_others + invalid + 1
    top = other_sizes[-1][0] if other_sizes else 0
    # With more votes than any other answer has samples, ours wins alone.
    single = _sum_binomials(size, size + 1, width) - _sum_binomials(size, min(top, size) + 1, width)
    single *= _sum_binomials(num_others + invalid, num_others + invalid + 1, width)
    wins = [single]
    for votes in range(1, top + 1):
        # Answers with fewer samples may have any number of votes: (1 + x)^n for n samples.
        rivals = [other for other in other_sizes if other[0] >= votes]
        free = invalid + num_others - sum([other * repeats for other, repeats in rivals])
        shift = votes * width
        if votes > size:
            single += _count_sole_wins(rivals, free + size, votes, width)
            continue
        terms = [_sum_binomials(free, free + 1, width)]  # coefficients of y^i x^(i * votes)
        for other, repeats in rivals:
            below, at = _sum_binomials(other, votes, width), math.comb(other, votes)
            for _ in range(repeats):
                more = [term * at for term in terms]
                terms = [term * below for term in terms]
                for tied in range(len(more) - 1):
                    terms[tied + 1] += more[tied]
                terms.append(more[-1])
        wins += [0] * (len(terms) - len(wins))
        ways = math.comb(size, votes)
        for tied, term in enumerate(terms, 1):
            wins[tied - 1] += term * ways << tied * shift
        # Either ours wins alone, or ours has fewer votes and another answer wins alone.
        single += (terms[0] * ways + terms[1] * _sum_binomials(size, votes, width)) << shift
    return tuple(wins), single


def _count_sole_wins(rivals: Sequence[tuple[int, int]], free: int, votes: int, width: int) -> int:
    """Return the coefficient of y in the product of `_count_wins`: one rival wins alone.

    Args:
        rivals: (size, number of answers) pairs of the answers that can have `votes` votes.
        free: Samples of all other answers and invalid samples; any number of them may be drawn.
        votes: Votes of the winner.
        width: Bits of one coefficient.
    """
    none, one = _sum_binomials(free, free + 1, width), 0
    for size, repeats in rivals:
        below = _sum_binomials(size, votes, width)
        at = repeats * math.comb(size, votes) << votes * width
        fewer = below ** (repeats - 1)
        none, one = none * fewer * below, (one * below + none * at) * fewer
    return one


@lru_cache(maxsize=1 << 14)
def _sum_binomials(size: int, votes: int, width: int) -> int:
    """Return the sum of C(size, a) x^a over a < votes, with x = 2^width."""
    return sum(math.comb(size, a) << a * width for a in range(min(votes, size + 1)))


@lru_cache(maxsize=1 << 14)
def _win_probability_float(
    size: int, other_sizes: _Sizes, invalid: int, k: int, share_ties: bool
) -> float:
    """Return the probability that one answer wins a vote of k, in doubles, accurate to about 1e-12.

    Drawing k of n samples without replacement is drawing Binomial(n_i, k/n) from each answer's
    n_i samples, given that the draws add up to k. With j votes for our answer, the probability that
    no other answer has more is a coefficient of a product of small polynomials, one per answer:

        [x^(k-j)]  prod_i (sum_{a<j} b_i(a) x^a  +  y b_i(j) x^j)  *  (invalid: any number)

    where y counts the answers that tie. With t ties our share is 1/(1+t), the integral of y^t
    from 0 to 1, which Gauss-Legendre nodes give exactly; without `share_ties`, y = 0. The
    coefficient follows from the values at roots of unity. The parameter k/n concentrates the
    probability at the required coefficient, so doubles are accurate enough for any n.
    """
    num = size + invalid + sum(other * repeats for other, repeats in other_sizes)
    if k == num:
        top = max((other for other, _ in other_sizes), default=0)
        tied = sum(repeats for other, repeats in other_sizes if other == size)
        return 0.0 if size < top or (tied and not share_ties) else 1.0 / (1 + tied)
    if k == 1:
        return size / num
    rate = k / num
    # With this number of roots only coefficients beyond k + slack alias with the required one;
    # by a Chernoff bound they hold less than 1e-19.
    slack = 15 + math.ceil(math.sqrt(225 + 90 * k))
    num_roots = min(num, k + slack) + 1
    root = _roots(num_roots)
    max_votes = min(size, k)
    weight = np.zeros((len(other_sizes), max_votes + 1))
    for row, (other, _) in enumerate(other_sizes):
        weight[row, : min(other, max_votes) + 1] = _binomial(other, rate)[: max_votes + 1]
    repeats_D = np.array([repeats for _, repeats in other_sizes])
    binomial = _binomial(size, rate)
    free = (1 - rate + rate * root) ** invalid
    total = 0.0
    below = np.zeros((1, len(other_sizes), num_roots), dtype=np.complex128)
    # Votes for our answer, j, in blocks of J values, so that arrays [J, A, R] (votes, other sizes,
    # roots) stay small.
    block = max(1, _BLOCK // max(1, below.size))
    for start in range(0, max_votes + 1, block):
        votes_J = np.arange(start, min(max_votes + 1, start + block))
        turns_JR = root[np.outer(votes_J, np.arange(num_roots)) % num_roots]
        at_JAR = weight.T[votes_J][:, :, None] * turns_JR[:, None, :]
        upto = np.concatenate([below, at_JAR]).cumsum(axis=0)
        below_JAR, below = upto[:-1], upto[-1:]
        # Up to one tied rival needs one node, at 0.5; without shares the node is 0.
        middle = 0.5 if share_ties else 0.0
        product_JR = np.prod((below_JAR + middle * at_JAR) ** repeats_D[:, None], axis=1)
        for at, j in enumerate(votes_J.tolist()) if share_ties else ():
            rivals = int(sum(repeats for other, repeats in other_sizes if other >= j))
            if j and (degree := min(rivals, k // j - 1)) > 1:
                nodes, mass = _compute_quadrature(degree)
                factors = below_JAR[at, :, None] + nodes[:, None] * at_JAR[at, :, None]
                product_JR[at] = mass @ np.prod(factors ** repeats_D[:, None, None], axis=0)
        shift_JR = root[np.outer(votes_J - k, np.arange(num_roots)) % num_roots]
        coefficient_J = (product_JR * free * shift_JR).mean(axis=1).real
        for j, coefficient in zip(votes_J.tolist(), coefficient_J.tolist(), strict=True):
            if j:  # without a vote nobody wins
                total += float(binomial[j]) * coefficient
    return min(1.0, max(0.0, total / float(_binomial(num, rate)[k])))


@lru_cache(maxsize=1024)
def _log_factorials(num: int) -> _FloatArray:
    """Return the logarithms of 0! to num!, [num + 1]."""
    logs: _FloatArray = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num + 1)))])
    return logs


@lru_cache(maxsize=4096)
def _binomial(num: int, rate: float) -> _FloatArray:
    """Return the probabilities of 0 to num successes in num trials, [num + 1]."""
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
    roots: npt.NDArray[np.complex128] = np.exp(2j * np.pi * np.arange(num) / num)
    return roots


@lru_cache(maxsize=1024)
def _compute_quadrature(degree: int) -> tuple[_FloatArray, _FloatArray]:
    """Return nodes and weights that integrate polynomials of `degree` over [0, 1] exactly."""
    nodes, mass = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, mass / 2
