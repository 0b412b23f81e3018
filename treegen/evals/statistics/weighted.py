"""Weighted votes over samples: by the confidence of the model, or by a score.

A vote is a number for each sample and a rule, written NUMBER:RULE. A sample without a readable
answer has no vote, as in a majority. The numbers:

- logprob: the mean log-probability of the sample's tokens.
- likelihood: the exponential of `logprob`, which is the geometric mean of the probabilities.
- certainty: the mean self-certainty (Kang et al. 2025).
- confidence, lowest, bottom, tail: the confidences of DeepConf; see
  `treegen.evals.statistics.confidence.summary`.
- score: the score of the sample by a reward model or a verifier.

The rules:

- weighted: each answer has the sum of its samples' numbers. With scores this is weighted best-of-n.
  Log-probabilities are negative, so the smallest one among the voters is subtracted from each.
- borda, borda=P: of v voters the best has v^P votes, the next (v - 1)^P, the last 1. P is 0.5 by
  default.
- top=SHARE: `weighted` among the best voters only: this share of them, rounded up.
- best: the answer of the best sample (best-of-n).

Tied answers count for their shares, as in `maj_at_k`. `weighted_at_k` computes values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types, checked_class
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError

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
"""The numbers that samples may have, with the default rule of each."""
USC: Final = "usc"
ALL: Final = "all"
SUBSETS: Final = 256
"""Number of random subsets over which a value at k is averaged."""

_RULES: Final = ("weighted", "borda", "top", "best")
_BORDA: Final = 0.5
# Sums of the same weights in another order differ in their last digits; they count as a tie.
_TIE: Final = 1e-9

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@checked_class
@dataclass(frozen=True, slots=True)
class VoteRule:
    """One way to vote."""

    number: str
    """A name of NUMBERS."""
    rule: str
    """Weighted, borda, top or best."""
    parameter: float = 0.0
    """The exponent of `borda`, or the share of `top`."""

    @property
    def name(self) -> str:
        """The vote as users write it, NUMBER:RULE."""
        parameter = f"={self.parameter:g}" if self.rule in ("borda", "top") else ""
        return f"{self.number}:{self.rule}{parameter}"

    @staticmethod
    def of(text: str) -> "VoteRule":
        """Parse a vote: NUMBER:RULE, or NUMBER for the default rule of the number.

        Raises:
            InputError: there is no such vote.
        """
        number, _, rule = text.partition(":")
        if number not in NUMBERS:
            names = [*NUMBERS, USC, ALL]
            hint = did_you_mean(number, names) or f"; known: {', '.join(names)}"
            raise InputError(f"there is no vote {text!r}{hint}")
        rule, equals, value = (rule or NUMBERS[number]).partition("=")
        default = _BORDA if rule == "borda" else math.nan
        try:
            parameter = float(value) if equals else default if rule in ("borda", "top") else 0.0
        except ValueError:
            parameter = math.nan
        is_share = rule != "top" or 0 < parameter <= 1
        has_one = rule in ("borda", "top")
        if rule not in _RULES or not is_share or not parameter >= 0 or (equals and not has_one):
            raise InputError(
                f"vote {text!r} must be {number}:weighted, {number}:best, {number}:borda=P with "
                f"P of at least 0, or {number}:top=SHARE with SHARE above 0 and at most 1"
            )
        return VoteRule(number, rule, parameter)


@check_argument_types
def check_votes(names: Sequence[str]) -> None:
    """Raise InputError for a name that is not a vote."""
    for name in names:
        if name not in (ALL, USC):
            VoteRule.of(name)


def read_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a stored sample that votes may use as weights, by name."""
    numbers = {}
    num_tokens = record["num_tokens"]
    if num_tokens and (logprob := record.get("logprob")) is not None:
        numbers["logprob"] = logprob / num_tokens
    if (certainty := record.get("self_certainty")) is not None:
        numbers["certainty"] = certainty
    if confidence := record.get("confidence"):
        for name, value in confidence.items():
            numbers["confidence" if name == "mean" else name] = value
    return numbers


def add_likelihood(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a sample that votes can use, by name."""
    numbers = dict(numbers)
    if "logprob" in numbers:
        numbers["likelihood"] = math.exp(numbers["logprob"])
    return numbers


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
    """Return the mean share of correct answers in a vote among k of the samples.

    The value is the mean over subsets of k samples. It is exact for the rule `best`, and if there
    are few subsets. Otherwise no closed form is known, and the value is the mean over random
    subsets, which is unbiased. A fixed seed draws the same subsets for all votes of a problem.

    Args:
        vote: The number and the rule of the vote.
        numbers: The number of each sample.
        answers: The answer of each sample; None if it is not readable.
        correct: Whether the answer of each sample is right.
        k: Samples in a vote, at least 1.
        seed: Seed of the random subsets, if the value is not exact.
        num_subsets: Maximum number of subsets. If there are more, this many are drawn at random.

    Returns:
        The mean share; NaN if there are fewer than k samples.

    Raises:
        InputError: a number is not finite, or is negative and the rule sums the numbers.
    """
    num = len(numbers)
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")
    if num < k:
        return math.nan
    values = np.asarray(numbers, dtype=np.float64)
    check_weights(vote, values)
    if vote.rule == "best":
        return _best_at_k(values, answers, correct, k)
    chosen = _subsets(num, k, num_subsets, seed)
    return float(_shares(vote, values, answers, correct, chosen).mean())


def check_weights(vote: VoteRule, values: _Floats) -> None:
    """Raise InputError for numbers of samples that a vote cannot use."""
    if not np.isfinite(values).all():
        raise InputError(
            f"the {vote.number} of a sample is not finite, so the sample cannot vote; use a "
            f"vote without {vote.number}"
        )
    by_sum = vote.rule in ("weighted", "top") and vote.number != "logprob"
    if by_sum and (values < 0).any():
        raise InputError(
            f"the {vote.number} of each sample must be at least 0 for the rule {vote.rule}, got "
            f"{values.min():g}; use {vote.number}:borda or {vote.number}:best"
        )


def _subsets(num: int, k: int, num_subsets: int, seed: int) -> _Flags:
    """Return membership in subsets of k samples, [subsets, samples].

    These are all subsets if there are at most `num_subsets`, and random subsets otherwise.
    """
    if math.comb(num, k) <= num_subsets:
        every = np.array(list(combinations(range(num), k)))
        masks = np.zeros((len(every), num), dtype=np.bool_)
        np.put_along_axis(masks, every, True, axis=1)
        return masks
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
    """Return the share of correct answers in the vote of each subset, [subsets].

    Args:
        vote: The number and the rule of the vote.
        values: [samples] the number of each sample.
        answers: The answer of each sample; None if it is not readable.
        correct: Whether the answer of each sample is right.
        chosen: [subsets, samples] whether each sample is in each subset.
    """
    readable = np.array([answer is not None for answer in answers])
    order = np.argsort(-values, kind="stable")
    order = order[readable[order]]
    voters, values = chosen[:, order], values[order]
    kinds = {answer: index for index, answer in enumerate(dict.fromkeys(answers[i] for i in order))}
    if not kinds:
        return np.zeros(len(chosen))
    of_answer = np.zeros((len(order), len(kinds)))
    of_answer[np.arange(len(order)), [kinds[answers[i]] for i in order]] = 1.0
    right = np.zeros(len(kinds), dtype=np.bool_)
    right[[kinds[answers[i]] for i in order if correct[i]]] = True
    weights = _weights(vote, values, voters)
    # An answer without samples in the subset is no candidate, even if all weights are 0.
    sums = np.where(voters @ of_answer > 0, weights @ of_answer, -np.inf)
    top = sums.max(axis=1, keepdims=True)
    wins = (sums >= top - _TIE * np.abs(top)) & np.isfinite(sums)
    shares: _Floats = (wins & right).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)
    return shares


def _weights(vote: VoteRule, values: _Floats, voters: _Flags) -> _Floats:
    """Return the votes of each sample, [subsets, samples].

    Args:
        vote: The number and the rule of the vote.
        values: [samples] the numbers of the samples, in descending order.
        voters: [subsets, samples] whether each sample is in each subset.
    """
    if vote.rule == "borda":
        # Shares of the most points, because powers of the points themselves may overflow.
        points = np.where(voters, _borda(values, voters), 0.0)
        shares = points / np.maximum(points.max(axis=1, keepdims=True), 1.0)
        return np.where(voters, shares**vote.parameter, 0.0)
    weights = np.broadcast_to(values, voters.shape)
    num = voters.sum(axis=1, keepdims=True)
    if vote.rule == "top":
        rank = voters.cumsum(axis=1)
        # The product is rounded first, so that a tenth of ten is one despite rounding errors.
        voters = voters & (rank <= np.ceil(np.round(vote.parameter * num, 9)))
    if vote.number == "logprob":
        lowest = np.where(voters, weights, np.inf).min(axis=1, keepdims=True, initial=np.inf)
        weights = weights - np.where(np.isfinite(lowest), lowest, 0.0)
    chosen_weights: _Floats = np.where(voters, weights, 0.0)
    return chosen_weights


def _borda(values: _Floats, voters: _Flags) -> _Floats:
    """Return the Borda points of each voter, [subsets, samples].

    A voter has one point for each voter that it is at least as good as, itself included. Voters
    with equal numbers have the mean of their points.
    """
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
    """Return the exact probability that the best readable sample among k is right.

    Let a of the n samples be readable and better than value v, and b of them readable and equal to
    v. The best drawn sample has value v if none of the a is drawn and at least one of the b is:
    (C(n-a, k) - C(n-a-b, k)) / C(n, k). Equally good drawn samples count for their shares, so by
    symmetry each of the b counts equally.
    """
    num, total = len(values), math.comb(len(values), k)
    readable = np.array([answer is not None for answer in answers])
    terms, better = [], 0
    for value in np.unique(values[readable])[::-1]:
        equal = np.flatnonzero(readable & (values == value))
        right = sum(correct[i] for i in equal.tolist())
        ways = math.comb(num - better, k) - math.comb(num - better - len(equal), k)
        terms.append(ways / total * right / len(equal))
        better += len(equal)
    return math.fsum(terms)
