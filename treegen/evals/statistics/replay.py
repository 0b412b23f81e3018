"""Replay of early stopping on a finished run: the tokens it would have saved, and its accuracy.

A rule is replayed on the samples of a run in random orders, drawn with a fixed seed. The samples of
a problem are independent draws, so the mean over orders is an unbiased estimate of the vote and the
tokens of a run that stops by the rule, with at most as many samples. The rule never sees the
outcome of a stop when it decides to stop.

Shape letters: O orders, N samples, R rounds, A answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types, check_int
from treegen.evals.statistics.votes import Tally, tally
from treegen.evals.verdict import Verdict

ORDERS: Final = 32

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawnProblem:
    """The samples of one problem."""

    verdicts: Sequence[Verdict]
    """The verdict of each sample by one filter."""
    tokens: Sequence[int]
    """Number of tokens of each sample."""

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens of a sample."""
        return sum(self.tokens) / len(self.tokens)


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The outcome of a rule for one problem, averaged over orders."""

    vote: float
    """The share of right answers in the vote."""
    tokens: float
    """Number of tokens drawn for the vote."""
    samples: float
    """Number of samples drawn for the vote."""


@check_argument_types
def replay_majority(drawn: DrawnProblem, k: int, votes: Tally | None = None) -> RuleOutcome:
    """Return the exact expected outcome of a majority vote of k samples.

    Args:
        drawn: The samples of the problem.
        k: Samples in the vote.
        votes: The tally of the samples; None computes it from `drawn`.
    """
    vote = (votes or tally(drawn.verdicts)).maj_at_k(k)
    return RuleOutcome(vote, k * drawn.mean_tokens, k)


@check_argument_types
def replay_early_stopping(
    drawn: DrawnProblem,
    chances: Sequence[float],
    batch: int,
    *,
    orders: int = ORDERS,
    seed: int = 0,
) -> list[RuleOutcome]:
    """Return the outcomes of stopping once the leading answer will probably stay ahead.

    Args:
        drawn: The samples of the problem.
        chances: Required probabilities that the leading answer stays ahead. Each has one outcome
            in the result; all outcomes use the same orders.
        batch: Samples of a round; the rule decides after each round.
        orders: Number of random orders.
        seed: Seed of the random orders.
    """
    check_int("batch", batch, minimum=1)
    check_int("orders", orders, minimum=1)
    check_int("seed", seed, minimum=0)
    order_ON = _orders(len(drawn.tokens), orders, seed)
    codes, right_A = _codes(drawn.verdicts)
    tokens_ON = np.asarray(drawn.tokens, dtype=np.float64)[order_ON].cumsum(axis=1)
    counts_ORA, ends = _counts(codes[order_ON], len(right_A), batch)
    ahead_OR = _ahead(counts_ORA)
    outcomes = []
    for chance in chances:
        at_O = _first_decided(ahead_OR, chance)
        final_OA = counts_ORA[np.arange(len(order_ON)), at_O]
        end_O = ends[at_O]
        used_O = tokens_ON[np.arange(len(order_ON)), end_O - 1]
        vote = float(_right_shares(final_OA, right_A).mean())
        outcomes.append(RuleOutcome(vote, float(used_O.mean()), float(end_O.mean())))
    return outcomes


@lru_cache(maxsize=64)  # most problems have equally many samples
def _orders(num: int, orders: int, seed: int) -> _Ints:
    keys = np.random.default_rng((seed, num)).random((orders, num))
    orders_ON: _Ints = keys.argsort(axis=1)
    orders_ON.flags.writeable = False
    return orders_ON


def _codes(verdicts: Sequence[Verdict]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Return the index of each sample's answer, [N], and whether each answer is right, [A].

    Samples without an answer have index -1.
    """
    code_of: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.answer is not None:
            code_of.setdefault(verdict.answer, len(code_of))
    codes = [-1 if v.answer is None else code_of[v.answer] for v in verdicts]
    right = np.zeros(len(code_of), dtype=np.bool_)
    right[[code_of[v.answer] for v in verdicts if v.answer is not None and v.correct]] = True
    return np.array(codes, dtype=np.int64), right


def _counts(codes_ON: _Ints, num_answers: int, batch: int) -> tuple[_Ints, _Ints]:
    """Return the votes of each answer after each round, [O, R, A], and the ends of rounds, [R]."""
    num_orders, num = codes_ON.shape
    ends = np.array([*range(batch, num, batch), num], dtype=np.int64)
    shape = num_orders, len(ends), num_answers
    order, sample = np.nonzero(codes_ON >= 0)
    cell = (order * len(ends) + sample // batch) * num_answers + codes_ON[order, sample]
    counts = np.bincount(cell, minlength=math.prod(shape)).reshape(shape)
    counts_ORA: _Ints = counts.cumsum(axis=1)
    return counts_ORA, ends


def _ahead(counts_ORA: _Ints) -> _Floats:
    """Return the probability, after each round, that the leading answer stays ahead, [O, R].

    It is -inf until a sample has a vote, so that no rule stops.
    """
    none = np.zeros((*counts_ORA.shape[:2], 2), dtype=counts_ORA.dtype)
    top = np.sort(np.concatenate([counts_ORA, none], axis=-1), axis=-1)[..., -2:]
    # The size is rounded up to a power of 2, so that many problems share few tables.
    table = _agreements(1 << int(top.max(initial=0)).bit_length())
    return np.where(top[..., 1] > 0, table[top[..., 1], top[..., 0]], -math.inf)


def _first_decided(ahead_OR: _Floats, chance: float) -> _Ints:
    """Return the round after which the vote of each order is decided, or the last round, [O]."""
    decided = ahead_OR >= chance
    decided[:, -1] = True
    first_O: _Ints = decided.argmax(axis=1)
    return first_O


@lru_cache(maxsize=8)
def _agreements(max_votes: int) -> _Floats:
    """Return the probability of the beta rule for all votes of the first and the second answer.

    These are the values of `treegen.search.strategies.majority.lead_probability`. The last toss is
    heads or tails, so the number of ways of a pair is the sum of those with one vote less for
    either answer.
    """
    table = np.empty((max_votes + 1, max_votes + 1))
    ways = [1] * (max_votes + 1)
    for first in range(max_votes + 1):
        for second in range(max_votes + 1):
            if second == 0:
                ways[0] = 2 ** (first + 1) - 1
            elif first:
                ways[second] += ways[second - 1]
            table[first, second] = ways[second] / 2 ** (first + second + 1)
    return table


def _right_shares(counts_OA: _Ints, right_A: npt.NDArray[np.bool_]) -> _Floats:
    """Return the share of right answers in each vote, [O]; tied answers count for their shares."""
    top = counts_OA.max(axis=1, keepdims=True, initial=0)
    wins = (counts_OA == top) & (top > 0)
    shares: _Floats = (wins & right_A).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)
    return shares
