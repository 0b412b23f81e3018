"""Majority votes over extracted answers.

A sample without a readable answer has no vote, and a vote without any readable answer is wrong.
In a metric each tied answer counts for its share (see `maj_at_k`): a rule that uses the
order of the samples would make the score depend on that order, and breaking ties at random only
adds noise around the same mean. If one answer must be shown, it is the tied answer whose first
sample is earliest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from treegen.common.checks import check_argument_types
from treegen.evals.statistics.maj_at_k import maj_at_k, votes_at
from treegen.evals.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of a vote."""

    answer: str | None
    """The winner; if several tie, the first in the order of samples. None if no sample has a
    readable answer."""
    votes: int
    """Number of votes of the winner."""
    tied: tuple[str, ...]
    """Every answer with the most votes, ordered by their first samples."""


@check_argument_types
def majority_vote(answers: Iterable[str | None]) -> Vote:
    """Return the most frequent answer; None has no vote."""
    return winner(Counter(answers))


@check_argument_types
def winner(counts: Mapping[str | None, int]) -> Vote:
    """Return the answer with the most votes; None has no vote.

    Args:
        counts: Votes by answer, ordered by the first sample of each answer.
    """
    votes_of = {answer: votes for answer, votes in counts.items() if answer is not None}
    top = max(votes_of.values(), default=0)
    tied = tuple(answer for answer, votes in votes_of.items() if votes == top)
    return Vote(tied[0] if tied else None, top, tied)


def count_distinct(objects: Sequence[T]) -> list[tuple[T, int]]:
    """Return each distinct object and its number of occurrences, by order of first occurrence.

    Objects are distinct by identity, not by equality.
    """
    by_id = {id(item): item for item in objects}
    return list(zip(by_id.values(), Counter(map(id, objects)).values(), strict=True))


def count_verdicts(verdicts: Iterable[tuple[Verdict, int]]) -> dict[tuple[str | None, bool], int]:
    """Return how often each answer was scored right or wrong, by order of first occurrence.

    Args:
        verdicts: (verdict, number of occurrences) pairs, as `count_distinct` returns them. Equal
            verdicts of a run are one object, so there are few pairs.

    Returns:
        Numbers of samples by (answer, whether it is correct).
    """
    counts: dict[tuple[str | None, bool], int] = {}
    for verdict, times in verdicts:
        key = verdict.answer, verdict.correct
        counts[key] = counts.get(key, 0) + times
    return counts


# Most problems share their counts with another problem, and a run has several tables of votes.
_maj_at_k = lru_cache(maxsize=1 << 16)(maj_at_k)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many samples of one problem gave each answer."""

    correct: tuple[int, ...]
    """Number of samples of each distinct correct answer."""
    wrong: tuple[int, ...]
    """Number of samples of each distinct wrong answer."""
    invalid: int
    """Samples without a readable answer."""

    @property
    def num_samples(self) -> int:
        """The number of all samples, including those without a readable answer."""
        return sum(self.correct) + sum(self.wrong) + self.invalid

    def maj_at_k(self, k: int) -> float:
        """Return the expected share of correct answers in a vote of k; NaN if k is too large."""
        return _maj_at_k(self.correct, self.wrong, self.invalid, k)

    def votes_at(self, ks: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Return `maj_at_k` and `tie_at_k` for each k."""
        return votes_at(self.correct, self.wrong, self.invalid, ks)


def tally(verdicts: Sequence[Verdict]) -> Tally:
    """Count the answers of one problem's samples."""
    return tally_of(count_distinct(verdicts))


def tally_of(verdicts: Iterable[tuple[Verdict, int]]) -> Tally:
    """Count the answers of one problem's samples from distinct verdicts.

    Args:
        verdicts: (verdict, number of occurrences) pairs.
    """
    counts = count_verdicts(verdicts)
    invalid = counts.pop((None, False), 0)
    # Sorted, so that problems with the same counts share the cached work of the estimators.
    right = sorted([votes for (_, correct), votes in counts.items() if correct])
    wrong = sorted([votes for (_, correct), votes in counts.items() if not correct])
    return Tally(tuple(right), tuple(wrong), invalid)
