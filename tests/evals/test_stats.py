"""Estimators against enumeration, and against values known from elsewhere."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treegen.errors import InputError
from treegen.evals.statistics.estimators import (
    difference_interval,
    estimate,
    mean_interval,
    pass_at_k,
)
from treegen.evals.statistics.maj_at_k import (
    _remove_answer,
    _win_probability_float,
    maj_at_k,
    tie_at_k,
    votes_at,
)

_COUNTS = st.lists(st.integers(0, 4), max_size=4)


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "want"),
    [
        (5, 2, 3, 0.9),
        (10, 1, 5, 0.5),
        (128, 1, 100, 0.78125),
        (128, 3, 10, 0.218117),
        (10, 8, 3, 1.0),
        (10, 0, 3, 0.0),
        (7, 3, 1, 3 / 7),
    ],
)
def test_pass_at_k_gives_known_values(
    num_samples: int, num_correct: int, k: int, want: float
) -> None:
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(want, abs=1e-6)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(
    num_samples: int, data: st.DataObject
) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    subsets = list(itertools.combinations(range(num_samples), k))
    want = sum(min(subset) < num_correct for subset in subsets) / len(subsets)
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(want, abs=1e-12)


def test_too_few_samples_are_undefined_and_not_zero() -> None:
    assert math.isnan(pass_at_k(4, 4, 5))
    assert math.isnan(maj_at_k([4], [], 0, 5))
    assert math.isnan(tie_at_k([4], 0, 5))


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(counts: tuple[int, int, int]) -> None:
    with pytest.raises(InputError):
        pass_at_k(*counts)


def enumerate_votes(
    correct: Sequence[int], wrong: Sequence[int], invalid: int, k: int
) -> tuple[float, float]:
    """Return (expected share of correct answers, rate of ties) over every subset of size k."""
    voters: list[tuple[bool, int] | None] = [None] * invalid
    voters += [(True, i) for i, votes in enumerate(correct) for _ in range(votes)]
    voters += [(False, i) for i, votes in enumerate(wrong) for _ in range(votes)]
    shares, ties, num = 0.0, 0, 0
    for subset in itertools.combinations(voters, k):
        num += 1
        votes = Counter(answer for answer in subset if answer is not None)
        if votes:
            winners = [answer for answer in votes if votes[answer] == max(votes.values())]
            shares += sum(right for right, _ in winners) / len(winners)
            ties += len(winners) > 1
    return shares / num, ties / num


@settings(max_examples=150, deadline=None)
@given(_COUNTS, _COUNTS, st.integers(0, 3), st.data())
def test_votes_equal_their_enumeration(
    correct: list[int], wrong: list[int], invalid: int, data: st.DataObject
) -> None:
    correct, wrong = correct[:2], wrong[:3]
    num = sum(correct) + sum(wrong) + invalid
    if not 0 < num <= 12:
        return
    k = data.draw(st.integers(1, num))
    share, ties = enumerate_votes(correct, wrong, invalid, k)
    assert maj_at_k(correct, wrong, invalid, k) == pytest.approx(share, abs=1e-12)
    assert tie_at_k(correct + wrong, invalid, k) == pytest.approx(ties, abs=1e-11)


@pytest.mark.parametrize(("num", "k", "num_answers"), [(40, 8, 9), (1024, 100, 50), (1024, 512, 9)])
def test_every_vote_is_won_by_someone(num: int, k: int, num_answers: int) -> None:
    """At sizes that cannot be enumerated the answers' shares still add up to all valid votes."""
    cuts = sorted(random.Random(num + k).sample(range(1, num), num_answers))
    invalid, *sizes = np.diff([0, *cuts, num]).tolist()
    shares = [
        maj_at_k([size], sizes[:index] + sizes[index + 1 :], invalid, k)
        for index, size in enumerate(sizes)
    ]
    none_valid = math.comb(invalid, k) / math.comb(num, k)
    assert math.fsum(shares) == pytest.approx(1 - none_valid, abs=1e-10)
    assert maj_at_k(sizes, [], invalid, k) == pytest.approx(1 - none_valid, abs=1e-10)


def count_wins(size: int, others: Sequence[int], invalid: int, k: int, share: bool) -> Fraction:
    """The chance that an answer wins, by adding up all numbers of votes that answers can have."""
    ways: Counter[tuple[int, int, int]] = Counter()  # by samples drawn, most votes, and ties for it
    ways[0, 0, 0] = 1
    for other in others:
        more: Counter[tuple[int, int, int]] = Counter()
        for (drawn, top, tied), count in ways.items():
            for votes in range(min(other, k - drawn) + 1):
                ties = tied + 1 if votes == top else 1 if votes > top else tied
                key = (drawn + votes, max(top, votes), ties)
                more[key] += count * math.comb(other, votes)
        ways = more
    found = Fraction(0)
    for (drawn, top, tied), count in ways.items():
        for votes in range(max(1, top), min(size, k - drawn) + 1):
            weight = count * math.comb(size, votes) * math.comb(invalid, k - drawn - votes)
            if votes > top or share:
                found += Fraction(weight, 1 + tied * (votes == top))
    return found / math.comb(size + sum(others) + invalid, k)


def test_chances_of_votes_are_right_to_the_last_digits() -> None:
    rng = random.Random(4)
    for _ in range(50):
        num = rng.choice([rng.randint(1, 20), 40, 64])
        sizes: list[int] = []
        while sum(sizes) < num and rng.random() < 0.9:
            most = num - sum(sizes)
            sizes.append(min(most, rng.choice([1, 1, 2, 3, rng.randint(1, most)])))
        if not sizes:
            continue
        size, invalid = rng.choice(sizes), num - sum(sizes)
        others = list(sizes)
        others.remove(size)
        for k in {1, rng.randint(1, num), num}:
            counts = (size, _remove_answer(sizes, size), invalid, k)
            won = float(count_wins(size, others, invalid, k, True))
            assert maj_at_k([size], others, invalid, k) == pytest.approx(won, rel=1e-15, abs=0)
            single = float(count_wins(size, others, invalid, k, False))
            # What takes over where there are more samples.
            assert _win_probability_float(*counts, True) == pytest.approx(won, abs=1e-12)
            assert _win_probability_float(*counts, False) == pytest.approx(single, abs=1e-12)
        k = rng.randint(1, num)
        ties = 1 - Fraction(math.comb(invalid, k), math.comb(num, k))
        for place, each in enumerate(sizes):
            ties -= count_wins(each, sizes[:place] + sizes[place + 1 :], invalid, k, False)
        assert tie_at_k(sizes, invalid, k) == float(ties)


def test_votes_of_several_k_are_those_of_each_to_the_bit() -> None:
    rng = random.Random(6)
    for _ in range(120):
        num = rng.choice([1, 2, 7, 40, 64, 96, 97])
        sizes: list[int] = []
        while sum(sizes) < num and rng.random() < 0.9:
            most = num - sum(sizes)
            sizes.append(min(most, rng.choice([1, 1, 2, 3, rng.randint(1, most)])))
        right = rng.choice([0, 1, 1, 1, 2, 3])
        rng.shuffle(sizes)
        correct, wrong, invalid = tuple(sizes[:right]), tuple(sizes[right:]), num - sum(sizes)
        ks = tuple({1, rng.randint(1, num), num, num + 1})
        expected = [(maj_at_k(correct, wrong, invalid, k), tie_at_k(sizes, invalid, k)) for k in ks]
        assert repr(list(votes_at(correct, wrong, invalid, ks))) == repr(expected)


def test_vote_of_many_agrees_with_simulation() -> None:
    correct, wrong, invalid, k = [300], [280, 200, 100, 50, 50], 44, 100
    answers = np.repeat(np.arange(7), [*correct, *wrong, invalid])
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(4000):
        votes = np.bincount(generator.permutation(answers)[:k], minlength=7)[:6]
        winners = np.flatnonzero(votes == votes.max())
        shares.append((winners == 0).sum() / len(winners))
    error = np.std(shares) / math.sqrt(len(shares))
    assert abs(maj_at_k(correct, wrong, invalid, k) - np.mean(shares)) < 4.5 * error


def test_vote_by_hand() -> None:
    # One of two tied answers is right.
    assert maj_at_k([2], [2, 1], 3, 8) == 0.5
    assert tie_at_k([2, 2, 1], 3, 8) == 1.0
    # A vote of one is right as often as a sample is.
    assert maj_at_k([3], [4], 5, 1) == 3 / 12
    # Invalid samples are the most frequent and still do not win.
    assert maj_at_k([2], [1], 50, 53) == 1.0
    assert maj_at_k([], [], 5, 5) == 0.0
    assert tie_at_k([], 5, 5) == 0.0


def test_vote_refuses_negative_counts_and_k_zero() -> None:
    with pytest.raises(InputError, match="negative"):
        maj_at_k([-1], [2], 0, 1)
    with pytest.raises(InputError, match="k must be"):
        maj_at_k([1], [2], 0, 0)


def test_error_bars_count_problems() -> None:
    half = estimate([0.0, 1.0] * 50)
    assert half.value == 0.5
    assert half.stderr == pytest.approx(np.std([0, 1] * 50, ddof=1) / 10)
    # t(101) times the standard error of 51 right and 51 wrong.
    assert half.low == pytest.approx(0.5 - 1.983731 * 0.5 / math.sqrt(101), abs=1e-6)
    assert half.high == pytest.approx(1 - half.low, abs=1e-12)
    assert half.num_problems == 100


def test_interval_keeps_a_width_when_all_problems_agree() -> None:
    perfect = estimate([1.0] * 10)
    assert perfect.stderr == 0.0
    assert perfect.high == 1.0
    # 11/12 -+ t(11) / 12
    assert perfect.low == pytest.approx((11 - 2.200985) / 12, abs=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([1.0] * 10, [1.0] * 9 + [39 / 40]),
        ([0.5] * 10, [0.5] * 9 + [0.525]),
        ([0.0] * 200, [0.0] * 199 + [1 / 128]),
        ([0.0, 1.0] * 5, [1 / 128, 1.0] + [0.0, 1.0] * 4),
    ],
)
def test_interval_moves_little_when_one_problem_does(
    before: list[float], after: list[float]
) -> None:
    moved = abs(sum(after) - sum(before)) / len(before)
    first, second = estimate(before), estimate(after)
    assert abs(first.low - second.low) < 3 * moved
    assert abs(first.high - second.high) < 3 * moved


@pytest.mark.parametrize("num", [5, 6, 7, 9, 10, 12, 20, 28, 50, 100, 200])
def test_interval_of_right_and_wrong_holds_any_truth(num: int) -> None:
    """Computed, not drawn: all outcomes at all rates, those just outside of intervals included."""
    intervals = np.array(
        [mean_interval([1.0] * hits + [0.0] * (num - hits), 0, 1) for hits in range(num + 1)]
    )
    edges = np.concatenate([intervals[:, 0] - 1e-9, intervals[:, 1] + 1e-9])
    rates = np.concatenate([np.linspace(0.001, 0.999, 999), edges[(edges > 0) & (edges < 1)]])
    ways = np.array([float(math.comb(num, hits)) for hits in range(num + 1)])
    hits = np.arange(num + 1)
    chance = ways * rates[:, None] ** hits * (1 - rates[:, None]) ** (num - hits)
    held = (intervals[:, 0] <= rates[:, None]) & (rates[:, None] <= intervals[:, 1])
    assert (chance * held).sum(axis=1).min() >= 0.93


_DIFFICULTIES = (
    (0.02, 0.98),
    (0.05, 0.05),
    (0.4, 8.0),
    (8.0, 0.4),
    (0.3, 0.7),
    (1.0, 1.0),
    (3.0, 57.0),
    (60.0, 40.0),
)


@pytest.mark.parametrize(
    ("num", "num_samples"),
    [
        (5, 8),
        (10, 128),
        (40, 8),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((5, 128), (10, 8), (40, 128))),
        *(pytest.param(200, each, marks=pytest.mark.soak) for each in (8, 128)),
    ],
)
def test_interval_of_clustered_samples_holds_the_truth(num: int, num_samples: int) -> None:
    """Problems as hard as a Beta distribution says, each with the share of its samples."""
    rng = np.random.default_rng(num * 1000 + num_samples)
    rounds = {5: 3000, 10: 2000, 40: 1000, 200: 400}[num]
    for a, b in _DIFFICULTIES:
        rates = np.clip(rng.beta(a, b, (rounds, num)), 0, 1)
        shares = rng.binomial(num_samples, rates) / num_samples
        intervals = [mean_interval(row, 0, 1) for row in shares.tolist()]
        held = sum(low <= a / (a + b) <= high for low, high in intervals) / rounds
        assert held >= 0.93, (a, b, held)


@pytest.mark.parametrize("num", [5, 20, pytest.param(100, marks=pytest.mark.soak)])
def test_interval_of_a_paired_difference_holds_the_truth(num: int) -> None:
    rng = np.random.default_rng(num)
    for a, b, better, num_samples in itertools.product((0.3, 8), (0.4, 1), (0, 0.1, 0.5), (1, 16)):
        # The second run solves what the first did not with this chance.
        first = np.clip(rng.beta(a, b, (600, num)), 0, 1)
        second = first + better * (1 - first)
        runs = [rng.binomial(num_samples, rates) / num_samples for rates in (first, second)]
        truth = better * b / (a + b)
        intervals = [difference_interval(row) for row in (runs[1] - runs[0]).tolist()]
        held = sum(low <= truth <= high for low, high in intervals) / 600
        assert held >= 0.93, (a, b, better, num_samples, held)


def test_one_problem_has_no_standard_error() -> None:
    single = estimate([0.25])
    assert single.stderr is None
    assert single.low < 0.25 < single.high


@pytest.mark.parametrize("values", [[], [1.5], [math.nan], [-0.1]])
def test_estimate_refuses_what_is_no_rate(values: list[float]) -> None:
    with pytest.raises(InputError):
        estimate(values)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_interval_holds_the_mean_and_stays_in_range(values: list[float]) -> None:
    result = estimate(values)
    assert 0 <= result.low <= result.value + 1e-12
    assert result.value - 1e-12 <= result.high <= 1
    assert result == estimate(values[::-1])


@pytest.mark.parametrize("big", [0, 200])
def test_answers_without_samples_are_none_and_negative_counts_are_refused(big: int) -> None:
    for k in (1, 3, 7 + big):
        assert tie_at_k([0, 2, 3, 0], 2 + big, k) == tie_at_k([3, 2], 2 + big, k)
    assert math.isnan(tie_at_k([0, 2, 3], 2 + big, 8 + big))
    for counts, invalid in (([2, -1, 3], big), ([2 + big, 3], -1)):
        for k in (1, 2):
            with pytest.raises(InputError, match="negative"):
                tie_at_k(counts, invalid, k)
            with pytest.raises(InputError, match="negative"):
                maj_at_k(counts, [], invalid, k)
