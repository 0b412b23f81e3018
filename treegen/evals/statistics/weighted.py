"""Votes beyond the majority, over the same samples: by how sure the model was, or by a score.

A vote is a number for each sample and a rule, written NUMBER:RULE. A sample without a readable
answer has no vote, as in a majority. The numbers:

- logprob: the mean log-probability of the sample's tokens.
- likelihood: its exponential, the geometric mean of their probabilities.
- certainty: the mean self-certainty (Kang et al. 2025).
- confidence, lowest, bottom, tail: of DeepConf; see `treegen.evals.statistics.confidence.summary`.
- score: what a reward model or a verifier has given the sample.

The rules:

- weighted: each answer has the sum of its samples' numbers. With scores this is weighted best-of-n.
  Log-probabilities are negative, so what counts is how far they are above the least among the
  voters.
- borda, borda=P: of v voters the best has v^P votes, the next (v - 1)^P, the last one. P is 0.5.
- top=SHARE: as weighted, among the best voters: this share of them, rounded up.
- best: the answer of the best sample (best-of-n).

Tied answers count for their shares, as in `majority.maj_at_k`.

The value at k is the mean over subsets of k samples. For `best`, and where there are few subsets,
it is exact. Otherwise no closed form is known, and it is the mean over random subsets, which is
unbiased. They are drawn by a fixed seed, the same for all votes of a problem.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types, checked_class
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.evals.verdict import SampleScore

NUMBERS: Final = {
    "logprob": "borda",
    "likelihood": "weighted",
    "certainty": "borda",
    "confidence": "weighted",
    "lowest": "weighted",
    "bottom": "weighted",
    "tail": "weighted",
    "score": "weighted",
}
"""The numbers that samples may have, each with the rule that is meant if none is given."""
USC: Final = "usc"
ALL: Final = "all"
SUBSETS: Final = 256
"""Random subsets that a value at k is the mean over."""

_RULES: Final = ("weighted", "borda", "top", "best")
_BORDA: Final = 0.5
# Sums of the same weights in another order differ in their last digits, and are a tie.
_TIE: Final = 1e-9

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@checked_class
@dataclass(frozen=True, slots=True)
class VoteRule:
    """One way to vote. parameter: of `borda` and `top`."""

    number: str
    rule: str
    parameter: float = 0.0

    @property
    def name(self) -> str:
        """As users write it."""
        told = f"={self.parameter:g}" if self.rule in ("borda", "top") else ""
        return f"{self.number}:{self.rule}{told}"

    @staticmethod
    def of(text: str) -> "VoteRule":
        """Return the vote of a name.

        Raises:
            InputError: there is no such vote.
        """
        number, _, rule = text.partition(":")
        if number not in NUMBERS:
            known = [*NUMBERS, USC, ALL]
            hint = did_you_mean(number, known)
            raise InputError(f"there is no vote {text!r}{hint}; votes are {', '.join(known)}")
        rule, equals, told = (rule or NUMBERS[number]).partition("=")
        default = _BORDA if rule == "borda" else math.nan
        try:
            parameter = float(told) if equals else default if rule in ("borda", "top") else 0.0
        except ValueError:
            parameter = math.nan
        is_share = rule != "top" or 0 < parameter <= 1
        has_one = rule in ("borda", "top")
        if rule not in _RULES or not is_share or not parameter >= 0 or (equals and not has_one):
            raise InputError(
                f"vote {text!r} must be {number}:weighted, {number}:best, {number}:borda=P with P "
                f"from 0 on, or {number}:top=SHARE with a share above 0 and up to 1"
            )
        return VoteRule(number, rule, parameter)


@check_argument_types
def check_votes(names: Sequence[str]) -> None:
    """Raise InputError for a name that is no vote."""
    for name in names:
        if name not in (ALL, USC):
            VoteRule.of(name)


def get_vote_weights(sample: "SampleScore") -> Mapping[str, float]:
    """Return the numbers that a sample has, by name."""
    found = dict(sample.numbers)
    if "logprob" in found:
        found["likelihood"] = math.exp(found["logprob"])
    return found


@check_argument_types
def weighted_at_k(
    vote: VoteRule,
    numbers: Sequence[float],
    answers: Sequence[str | None],
    correct: Sequence[bool],
    k: int,
    *,
    seed: int = 0,
    num_subsets: int = SUBSETS,
) -> float:
    """Return the mean share of a correct answer in a vote among k of the samples.

    NaN if there are fewer than k samples.

    Args:
        numbers: Of each sample.
        answers: Of each sample.
        correct: Of each sample.
        seed: Of the random subsets, where the value is not exact.
        num_subsets: Of the random subsets, where the value is not exact.

    Raises:
        InputError: a number is negative and the rule is weighted, or one is not finite.
    """
    num = len(numbers)
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")
    if num < k:
        return math.nan
    values = np.asarray(numbers, dtype=np.float64)
    _check(vote, values)
    if vote.rule == "best":
        return _best_at_k(values, answers, correct, k)
    chosen = _subsets(num, k, num_subsets, seed)
    return float(_shares(vote, values, answers, correct, chosen).mean())


def _check(vote: VoteRule, values: _Floats) -> None:
    if not np.isfinite(values).all():
        raise InputError(
            f"a sample has no finite {vote.number}, so it cannot vote by it; vote by another number"
        )
    by_sum = vote.rule in ("weighted", "top") and vote.number != "logprob"
    if by_sum and (values < 0).any():
        raise InputError(
            f"a sample cannot have {values.min():g} votes; with a negative {vote.number} vote by "
            f"{vote.number}:borda or {vote.number}:best"
        )


def _subsets(num: int, k: int, num_subsets: int, seed: int) -> _Flags:
    """Return random subsets of k samples, or all if there are no more, [subsets, samples]."""
    if math.comb(num, k) <= num_subsets:
        every = np.array(list(combinations(range(num), k)))
        whole = np.zeros((len(every), num), dtype=np.bool_)
        np.put_along_axis(whole, every, True, axis=1)
        return whole
    keys = np.random.default_rng((seed, num, k)).random((num_subsets, num))
    chosen = np.zeros((num_subsets, num), dtype=np.bool_)
    np.put_along_axis(chosen, np.argpartition(keys, k - 1, axis=1)[:, :k], True, axis=1)
    return chosen


def _shares(
    vote: VoteRule,
    values: _Floats,
    answers: Sequence[str | None],
    correct: Sequence[bool],
    chosen: _Flags,
) -> _Floats:
    """Return the share of a correct answer in the vote of each subset, [subsets].

    Args:
        chosen: [subsets, samples] who is in each subset.
    """
    readable = np.array([answer is not None for answer in answers])
    order = np.argsort(-values, kind="stable")
    order = order[readable[order]]
    voters, values = chosen[:, order], values[order]
    kinds = {answer: place for place, answer in enumerate(dict.fromkeys(answers[i] for i in order))}
    if not kinds:
        return np.zeros(len(chosen))
    of_answer = np.zeros((len(order), len(kinds)))
    of_answer[np.arange(len(order)), [kinds[answers[i]] for i in order]] = 1.0
    right = np.zeros(len(kinds), dtype=np.bool_)
    right[[kinds[answers[i]] for i in order if correct[i]]] = True
    weights = _weights(vote, values, voters)
    # An answer that nobody in the subset gave is no candidate, even where all weights are 0.
    sums = np.where(voters @ of_answer > 0, weights @ of_answer, -np.inf)
    top = sums.max(axis=1, keepdims=True)
    wins = (sums >= top - _TIE * np.abs(top)) & np.isfinite(sums)
    shares: _Floats = (wins & right).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)
    return shares


def _weights(vote: VoteRule, values: _Floats, voters: _Flags) -> _Floats:
    """Return the votes of each sample, [subsets, samples], which come best first."""
    if vote.rule == "borda":
        points: _Floats = np.where(voters, _borda(values, voters) ** vote.parameter, 0.0)
        return points
    weights = np.broadcast_to(values, voters.shape)
    num = voters.sum(axis=1, keepdims=True)
    if vote.rule == "top":
        rank = voters.cumsum(axis=1)
        # Rounded, so that a tenth of ten is one whatever the rounding of the product.
        voters = voters & (rank <= np.ceil(np.round(vote.parameter * num, 9)))
    if vote.number == "logprob":
        least = np.where(voters, weights, np.inf).min(axis=1, keepdims=True, initial=np.inf)
        weights = weights - np.where(np.isfinite(least), least, 0.0)
    found: _Floats = np.where(voters, weights, 0.0)
    return found


def _borda(values: _Floats, voters: _Flags) -> _Floats:
    """Return how many voters each is at least as good as; the equal have their mean."""
    num = voters.sum(axis=1, keepdims=True)
    points: _Floats = num - voters.cumsum(axis=1) + 1.0
    _, group = np.unique(values, return_inverse=True)
    if len(np.unique(group)) == len(values):
        return points
    member = np.zeros((len(values), group.max() + 1))
    member[np.arange(len(values)), group] = 1.0
    totals, counts = np.where(voters, points, 0.0) @ member, voters @ member
    means: _Floats = (totals / np.maximum(counts, 1))[:, group]
    return means


def _best_at_k(
    values: _Floats, answers: Sequence[str | None], correct: Sequence[bool], k: int
) -> float:
    """Return the chance that the best of k samples with a readable answer is right, exactly.

    Of n samples, a are readable and better than value v, and b are equal to it. The best has value
    v if none of the a is drawn and one of the b is: (C(n-a, k) - C(n-a-b, k)) / C(n, k). Equally
    good samples that are drawn count for their shares, so by symmetry each of the b counts alike.
    """
    num, total = len(values), math.comb(len(values), k)
    readable = np.array([answer is not None for answer in answers])
    found, better = [], 0
    for value in np.unique(values[readable])[::-1]:
        mine = np.flatnonzero(readable & (values == value))
        right = sum(correct[i] for i in mine.tolist())
        ways = math.comb(num - better, k) - math.comb(num - better - len(mine), k)
        found.append(ways / total * right / len(mine))
        better += len(mine)
    return math.fsum(found)
