"""Votes by weights against brute force: every subset, one sample at a time."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from treegen.errors import InputError
from treegen.evals.scoring.vote_tables import VoteInputs, vote_table
from treegen.evals.statistics.maj_at_k import maj_at_k
from treegen.evals.statistics.weighted import NUMBERS, VoteRule, weighted_at_k
from treegen.evals.verdict import SampleScore, Verdict

Case = tuple[list[float], list[str | None], list[bool]]


def _case(seed: int, num: int, *, ties: bool = False, negative: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(1, 4, num) * 0.1 if ties else rng.random(num)
    answers: list[str | None] = [
        None if i == 4 else str(i) for i in rng.choice(5, num, p=[0.35, 0.3, 0.15, 0.1, 0.1])
    ]
    correct = [answer in ("1", "2") for answer in answers]
    return (-numbers if negative else numbers).tolist(), answers, correct


def _slow(vote: VoteRule, case: Case, subset: Sequence[int]) -> float:
    """The share of a correct answer in one vote, by the definition."""
    numbers, answers, correct = case
    voters = [i for i in subset if answers[i] is not None]
    if not voters:
        return 0.0
    ranked = sorted(voters, key=lambda i: -numbers[i])
    if vote.rule == "best":
        best = [i for i in voters if numbers[i] == numbers[ranked[0]]]
        return sum(correct[i] for i in best) / len(best)
    if vote.rule == "top":
        ranked = ranked[: math.ceil(round(vote.parameter * len(voters), 9))]
    least = min(numbers[i] for i in ranked)
    votes: dict[str, float] = defaultdict(float)
    for i in ranked:
        weight = numbers[i] - (least if vote.number == "logprob" else 0.0)
        if vote.rule == "borda":
            below = sum(numbers[j] < numbers[i] for j in voters)
            equal = sum(numbers[j] == numbers[i] for j in voters)
            weight = (below + (equal + 1) / 2) ** vote.parameter
        answer = answers[i]
        assert answer is not None
        votes[answer] += weight
    top = max(votes.values())
    winners = [answer for answer, each in votes.items() if each >= top - 1e-9 * abs(top)]
    return sum(correct[answers.index(winner)] for winner in winners) / len(winners)


NAMES = [
    "likelihood:weighted",
    "likelihood:best",
    "certainty:borda=0.5",
    "certainty:borda=1.2",
    "certainty:borda=0",
    "score:weighted",
    "logprob:weighted",
    "logprob:borda",
    "logprob:best",
    "score:borda",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ties", [False, True])
def test_where_all_subsets_are_few_the_value_is_their_mean(name: str, ties: bool) -> None:
    vote = VoteRule.of(name)
    for seed in range(12):
        num = 1 + seed % 8
        case = _case(seed, num, ties=ties, negative=vote.number == "logprob")
        for k in range(1, num + 1):
            subsets = list(combinations(range(num), k))
            slow = math.fsum(_slow(vote, case, subset) for subset in subsets) / len(subsets)
            assert weighted_at_k(vote, *case, k) == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
def test_the_most_confident_vote_alone(share: float) -> None:
    vote = VoteRule.of(f"tail:top={share}")
    for seed in range(8):
        case = _case(seed, 10)
        for k in (1, 3, 10):
            subsets = list(combinations(range(10), k))
            slow = math.fsum(_slow(vote, case, subset) for subset in subsets) / len(subsets)
            assert weighted_at_k(vote, *case, k) == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("exponent", ["400", "1e308", "inf"])
def test_a_large_exponent_lets_the_best_samples_decide(exponent: str) -> None:
    vote = VoteRule.of(f"likelihood:borda={exponent}")
    for best in (0.6, 0.9):
        numbers = [0.1, 0.2, 0.3, 0.9, 0.5, best, 0.7]
        answers = ["a", "a", "a", "b", "c", "c", "a"]
        found = weighted_at_k(vote, numbers, answers, [answer == "b" for answer in answers], 7)
        assert found == (1.0 if best < 0.9 else 0.5)


def test_equal_weights_are_a_majority() -> None:
    for seed in range(20):
        _, answers, correct = _case(seed, 9)
        counts = {a: answers.count(a) for a in answers if a is not None}
        right = [n for a, n in counts.items() if a in ("1", "2")]
        wrong = [n for a, n in counts.items() if a not in ("1", "2")]
        for name in ("likelihood:weighted", "certainty:borda=0"):
            for k in (1, 4, 9):
                found = weighted_at_k(VoteRule.of(name), [0.1] * 9, answers, correct, k)
                majority = maj_at_k(right, wrong, answers.count(None), k)
                assert found == pytest.approx(majority, abs=1e-9)


def test_random_subsets_are_unbiased_and_the_best_is_exact() -> None:
    case = _case(3, 14)
    for name in ("likelihood:weighted", "certainty:borda", "likelihood:best"):
        vote = VoteRule.of(name)
        subsets = list(combinations(range(14), 6))
        exact = math.fsum(_slow(vote, case, subset) for subset in subsets) / len(subsets)
        found = [weighted_at_k(vote, *case, 6, seed=seed) for seed in range(60)]
        error = float(np.std(found)) / math.sqrt(len(found))
        assert abs(float(np.mean(found)) - exact) <= max(4 * error, 1e-9)
        assert weighted_at_k(vote, *case, 6) == found[0]
        if vote.rule == "best":
            assert found[0] == pytest.approx(exact, abs=1e-12)


def test_many_samples_and_none() -> None:
    assert math.isnan(weighted_at_k(VoteRule.of("score"), [1.0], ["a"], [True], 2))
    assert weighted_at_k(VoteRule.of("score"), [1.0], [None], [False], 1) == 0.0
    assert weighted_at_k(VoteRule.of("score"), [0.0, 0.0], ["a", "b"], [True, False], 2) == 0.5
    case = _case(5, 64)
    assert 0 <= weighted_at_k(VoteRule.of("certainty"), *case, 33) <= 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "majority",
        "score:",
        "score:mean",
        "score:top",
        "score:top=0",
        "score:top=2",
        "score:borda=x",
        "score:borda=-1",
        "score:best=2",
        "logprobs",
    ],
)
def test_names_that_are_no_votes(name: str) -> None:
    if name == "score:":
        assert VoteRule.of(name).rule == NUMBERS["score"]
        return
    with pytest.raises(InputError):
        VoteRule.of(name)


def test_numbers_that_are_no_weights() -> None:
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(InputError):
            weighted_at_k(VoteRule.of("score"), [value, 1.0], ["a", "b"], [True, False], 1)
    assert (
        weighted_at_k(VoteRule.of("score:best"), [-1.0, 1.0], ["a", "b"], [True, False], 2) == 0.0
    )


def _samples(problem: str, answers: str, **numbers: Sequence[float]) -> list[SampleScore]:
    return [
        SampleScore(
            problem_id=problem,
            sample_index=index,
            finish_reason="stop",
            verdicts={"f": Verdict(answer, answer == "a")},
            numbers={name: values[index] for name, values in numbers.items()},
        )
        for index, answer in enumerate(answers)
    ]


def test_the_table_has_each_vote_beside_the_majority() -> None:
    scores = [
        *_samples("p", "abb", logprob=[-0.1, -2.0, -3.0]),
        *_samples("q", "aab", logprob=[-0.5, -0.6, -0.1]),
    ]
    given = {"p": (0.9, 0.2, 0.3), "q": (0.1, 0.2, 0.9)}
    votes = VoteInputs(
        scores={(name, i): score for name, each in given.items() for i, score in enumerate(each)},
        picks={"p": (0, 3), "q": (2, 3)},
    )
    table = vote_table(scores, ["f"], ["all", "score:best"], [3], votes)
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == [
        "logprob:borda=0.5",
        "likelihood:weighted",
        "score:weighted",
        "usc",
        "score:best",
    ]
    # Of p the majority is wrong and the surest sample right; of q it is the other way round.
    assert rows["likelihood:weighted"][3] == 1.0  # exp(-.5) + exp(-.6) > exp(-.1)
    assert rows["likelihood:weighted"][6] == 0.5  # the majority has 0.5
    assert rows["usc"][3] == rows["score:best"][3] == 0.5
    assert rows["usc"][6] == 0.0
    for _, _, _, value, low, high, less, least, most in table.rows:
        assert low <= value <= high and least <= less <= most  # type: ignore[operator]
    for name, label in (
        ("certainty", "self_certainty=True"),
        ("score", "scores.jsonl"),
        ("usc", "usc"),
        ("likelihood", "without tokens has no log-probability"),
    ):
        bare = [replace(sample, numbers={}) for sample in scores]
        (row,) = vote_table(bare, ["f"], [name], [3]).rows
        assert label in str(row[0]) and row[2:] == (None,) * 7
    worse = VoteInputs(scores={key: -score for key, score in votes.scores.items()})
    (row, best) = vote_table(scores, ["f"], ["score", "score:best"], [3], worse).rows
    assert (
        "must be at least 0 for the rule weighted, got -0.9" in str(row[0])
        and row[3] is None
        and best[3] == 0.5
    )


def test_a_pick_beyond_the_vote_has_no_value() -> None:
    # Earlier versions also showed samples after a missing one, such as 0, 2 and 5.
    samples = _samples("p", "abbbbb", logprob=[-0.1] * 6)
    assert vote_table(samples, ["f"], ["usc"], [3], VoteInputs(picks={"p": (5, 3)})).rows == ()
