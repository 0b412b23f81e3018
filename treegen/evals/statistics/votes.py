"""Majority votes over extracted answers.

An answer that could not be read has no vote. A vote in which no answer could be read is wrong.

In a metric each tied answer counts for its share: see `majority.maj_at_k`. A rule that looks at
the order of the samples would make the score depend on that order, and breaking ties at random only
adds noise around the same mean. If one answer must be shown, it is the tied answer that was given
first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from treegen.common.checks import check_argument_types
from treegen.evals.statistics.majority import maj_at_k, tie_at_k, votes_at
from treegen.evals.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vote:
    """What a vote came to.

    answer: the winner, of tied answers the one that was given first; None if none was readable.
    votes: how many the winner has.
    tied: every answer with the most votes, in the order in which they were first given.
    """

    answer: str | None
    votes: int
    tied: tuple[str, ...]


@check_argument_types
def majority_vote(answers: Iterable[str | None]) -> Vote:
    """Return the most frequent answer, None never counting."""
    return winner(Counter(answers))


@check_argument_types
def winner(counts: Mapping[str | None, int]) -> Vote:
    """Return the answer with the most votes, None never counting.

    Args:
        counts: Votes by answer, in the order in which they were first given.
    """
    given = {answer: votes for answer, votes in counts.items() if answer is not None}
    top = max(given.values(), default=0)
    tied = tuple(answer for answer, votes in given.items() if votes == top)
    return Vote(tied[0] if tied else None, top, tied)


def count_distinct(objects: Sequence[T]) -> list[tuple[T, int]]:
    """Return each object once, in the order of the first, and how often it is there."""
    known = {id(each): each for each in objects}
    return list(zip(known.values(), Counter(map(id, objects)).values(), strict=True))


def count_verdicts(verdicts: Iterable[tuple[Verdict, int]]) -> dict[tuple[str | None, bool], int]:
    """Return how often each answer was judged right or wrong, in the order of the first.

    Args:
        verdicts: Each with how often it is there, as of `distinct`: of a run, equal verdicts are
            one object, so few have to be looked into.
    """
    counts: dict[tuple[str | None, bool], int] = {}
    for verdict, times in verdicts:
        key = verdict.answer, verdict.correct
        counts[key] = counts.get(key, 0) + times
    return counts


# Of many problems most have the counts of another one, and a run has several tables of votes.
_maj_at_k = lru_cache(maxsize=1 << 16)(maj_at_k)
_tie_at_k = lru_cache(maxsize=1 << 16)(tie_at_k)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many samples of one problem gave each answer.

    correct, wrong: for each distinct correct or wrong answer, its number of samples.
    invalid: samples without a readable answer.
    """

    correct: tuple[int, ...]
    wrong: tuple[int, ...]
    invalid: int

    @property
    def num_samples(self) -> int:
        """All samples, the unreadable ones included."""
        return sum(self.correct) + sum(self.wrong) + self.invalid

    def maj_at_k(self, k: int) -> float:
        """Return the expected share of a correct answer in a vote of k; NaN if k is too many."""
        return _maj_at_k(self.correct, self.wrong, self.invalid, k)

    def tie_at_k(self, k: int) -> float:
        """Return the chance that a vote of k has no single winner; NaN if k is too many."""
        # Which answers are right does not matter here.
        return _tie_at_k(tuple(sorted((*self.correct, *self.wrong))), self.invalid, k)

    def votes_at(self, ks: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Return what `maj_at_k` and `tie_at_k` do, for each k."""
        return votes_at(self.correct, self.wrong, self.invalid, ks)


def tally(verdicts: Sequence[Verdict]) -> Tally:
    """Count the answers of one problem's samples."""
    return tally_of(count_distinct(verdicts))


def tally_of(verdicts: Iterable[tuple[Verdict, int]]) -> Tally:
    """Count the answers of one problem's samples. verdicts: each with how often it is there."""
    counts = count_verdicts(verdicts)
    invalid = counts.pop((None, False), 0)
    # Sorted, so that problems with the same counts share the cached work of the estimators.
    right = sorted([votes for (_, correct), votes in counts.items() if correct])
    wrong = sorted([votes for (_, correct), votes in counts.items() if not correct])
    return Tally(tuple(right), tuple(wrong), invalid)
