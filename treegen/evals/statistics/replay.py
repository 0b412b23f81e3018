"""What stopping early would have saved of a run that drew everything, and what it would have cost.

A rule is replayed on the samples of a run in random orders. The samples of a problem are
independent draws, so each order is one that the run could have had, and the mean over orders is an
unbiased estimate of the vote and of the tokens of a run that stops by the rule, with at most as
many samples. No stop is chosen by looking at what it comes to. Orders are drawn by a fixed seed.

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
    """The samples of one problem.

    verdicts: of each, by one filter.
    tokens: how many each has.
    """

    verdicts: Sequence[Verdict]
    tokens: Sequence[int]

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample in the mean."""
        return sum(self.tokens) / len(self.tokens)


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """What a rule comes to for one problem, in the mean over orders.

    vote: the share of a right answer in the vote. tokens, samples: that are drawn for it.
    """

    vote: float
    tokens: float
    samples: float


@check_argument_types
def replay_majority(drawn: DrawnProblem, k: int, votes: Tally | None = None) -> RuleOutcome:
    """Return what a majority of k samples comes to, exactly. votes: its tally, if it is known."""
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
    """Return what stopping comes to where the leading answer stays ahead with a chance.

    Args:
        chances: For each an outcome, all on the same orders.
        batch: Samples of a round; the rule is asked after each.
    """
    check_int("batch", batch, least=1)
    check_int("orders", orders, least=1)
    check_int("seed", seed, least=0)
    order_ON = _orders(len(drawn.tokens), orders, seed)
    codes, right_A = _codes(drawn.verdicts)
    tokens_ON = np.asarray(drawn.tokens, dtype=np.float64)[order_ON].cumsum(axis=1)
    counts_ORA, ends = _counts(codes[order_ON], len(right_A), batch)
    ahead_OR = _ahead(counts_ORA)
    found = []
    for chance in chances:
        at_O = _first_decided(ahead_OR, chance)
        final_OA = counts_ORA[np.arange(len(order_ON)), at_O]
        end_O = ends[at_O]
        used_O = tokens_ON[np.arange(len(order_ON)), end_O - 1]
        vote = float(_right_shares(final_OA, right_A).mean())
        found.append(RuleOutcome(vote, float(used_O.mean()), float(end_O.mean())))
    return found


@lru_cache(maxsize=64)  # most problems have equally many samples
def _orders(num: int, orders: int, seed: int) -> _Ints:
    keys = np.random.default_rng((seed, num)).random((orders, num))
    found: _Ints = keys.argsort(axis=1)
    found.flags.writeable = False
    return found


def _codes(verdicts: Sequence[Verdict]) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Return the number of each sample's answer, -1 for none, and which answers are right."""
    places: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.answer is not None:
            places.setdefault(verdict.answer, len(places))
    codes = [-1 if v.answer is None else places[v.answer] for v in verdicts]
    right = np.zeros(len(places), dtype=np.bool_)
    right[[places[v.answer] for v in verdicts if v.answer is not None and v.correct]] = True
    return np.array(codes, dtype=np.int64), right


def _counts(codes_ON: _Ints, num_answers: int, batch: int) -> tuple[_Ints, _Ints]:
    """Return the votes of each answer after each round, [O, R, A], and where rounds end."""
    num = codes_ON.shape[1]
    ends = np.array([*range(batch, num, batch), num], dtype=np.int64)
    is_mine = codes_ON[..., None] == np.arange(num_answers)
    counts_ORA: _Ints = is_mine.cumsum(axis=1)[:, ends - 1]
    return counts_ORA, ends


def _ahead(counts_ORA: _Ints) -> _Floats:
    """Return the chance that the leading answer stays ahead after each round, [O, R].

    It is below any chance as long as there is no vote.
    """
    none = np.zeros((*counts_ORA.shape[:2], 2), dtype=counts_ORA.dtype)
    top = np.sort(np.concatenate([counts_ORA, none], axis=-1), axis=-1)[..., -2:]
    # A size that many problems share, so that few tables are made.
    table = _agreements(1 << int(top.max(initial=0)).bit_length())
    return np.where(top[..., 1] > 0, table[top[..., 1], top[..., 0]], -math.inf)


def _first_decided(ahead_OR: _Floats, chance: float) -> _Ints:
    """Return the round after which each order's vote is decided, or else the last."""
    decided = ahead_OR >= chance
    decided[:, -1] = True
    found: _Ints = decided.argmax(axis=1)
    return found


@lru_cache(maxsize=8)
def _agreements(most: int) -> _Floats:
    """Return the beta rule's chance by the votes of the first and the second answer.

    It is `agreement` of all pairs. The last toss is a head or not, so the ways of a pair are those
    with one vote less for either.
    """
    found = np.empty((most + 1, most + 1))
    ways = [1] * (most + 1)
    for first in range(most + 1):
        for second in range(most + 1):
            if second == 0:
                ways[0] = 2 ** (first + 1) - 1
            elif first:
                ways[second] += ways[second - 1]
            found[first, second] = ways[second] / 2 ** (first + second + 1)
    return found


def _right_shares(counts_OA: _Ints, right_A: npt.NDArray[np.bool_]) -> _Floats:
    """Return the share of a right answer in each vote; tied answers count for their shares."""
    top = counts_OA.max(axis=1, keepdims=True, initial=0)
    wins = (counts_OA == top) & (top > 0)
    shares: _Floats = (wins & right_A).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)
    return shares
