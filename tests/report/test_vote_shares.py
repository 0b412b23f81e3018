"""Votes of a run's problems are those of a slow count of each sample on its own."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from treegen.evals.statistics.votes import count_distinct, count_verdicts, majority_vote, tally
from treegen.evals.verdict import Verdict
from treegen.report.curves import vote_shares


def _drawn(rng: random.Random, num: int) -> list[Verdict]:
    """Verdicts with ties, without answers, and answers both right and wrong; equal ones shared."""
    answers = [None, *map(str, range(rng.randrange(5)))]
    pool = [Verdict(a, a is not None and rng.random() < 0.4) for a in answers for _ in range(2)]
    found = [rng.choice(pool) for _ in range(num)]
    return [Verdict(v.answer, v.correct) if rng.random() < 0.2 else v for v in found]


def _slow(group: Sequence[Verdict]) -> tuple[object, ...]:
    answers = [v.answer for v in group if v.answer is not None]
    votes = {answer: answers.count(answer) for answer in dict.fromkeys(answers)}
    top = max(votes.values(), default=0)
    tied = [answer for answer in votes if votes[answer] == top]
    wrong = Counter(v.answer for v in group if v.answer is not None and not v.correct)
    right, leading, num = sum(v.correct for v in group), max(wrong.values(), default=0), len(group)
    return (
        right / num,
        leading / num,
        (wrong.total() - leading) / num,
        (num - right - wrong.total()) / num,
        tied[0] if tied else None,
        top / num,
        len(tied) > 1,
        any(v.correct and v.answer in tied for v in group),
    )


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    groups = {f"p{i}": _drawn(rng, rng.randrange(1, 12)) for i in range(100)}
    shares = vote_shares(groups)
    for s in shares:
        mine = (s.right, s.leading, s.other, s.invalid, s.answer, s.top, s.tied, s.won)
        assert mine == _slow(groups[s.problem_id])
    order = [(-s.right, s.leading, s.problem_id) for s in shares]
    assert order == sorted(order) and len(shares) == len(groups)


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    for num in range(40):
        group = _drawn(rng, num)
        pairs = [(v.answer, v.correct) for v in group]
        counts = count_verdicts(count_distinct(group))
        assert list(counts.items()) == [(p, pairs.count(p)) for p in dict.fromkeys(pairs)]
        votes = tally(group)
        assert votes.num_samples == num
        assert votes.invalid == sum(answer is None for answer, _ in pairs)
        for kind, mine in ((True, votes.correct), (False, votes.wrong)):
            some = Counter(a for a, correct in pairs if a is not None and correct is kind)
            assert list(mine) == sorted(some.values())
        answers = [v.answer for v in group if v.answer is not None]
        vote = majority_vote(iter([v.answer for v in group]))
        top = max(map(answers.count, answers), default=0)
        tied = tuple(a for a in dict.fromkeys(answers) if answers.count(a) == top)
        assert (vote.answer, vote.votes, vote.tied) == (tied[0] if tied else None, top, tied)
