"""How long passes take, and how many guesses of rows it pays to verify in one.

A pass reads the weights once, whatever the number of its tokens. So further tokens cost nothing
until it is computing, not reading, that takes the time. This gives the shape of the curve. Passes
that were measured give its height, for steps of one token a row and for steps that verify guesses
each, near numbers of tokens that there were.

Legend: R rows, K guesses of a row, M guesses of all rows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from treegen.common.drafter import Ints

Floats = NDArray[np.float64]

_GAIN: Final = 1.04  # guesses are verified where that is expected to be so much faster
_LIKELY: Final = 0.85  # of guesses that are accepted at best, where none are at hand
_UNKNOWN: Final = 1.05  # what verifying costs beside the further tokens, before it was measured
_SIZES: Final = 64  # half octaves of tokens
_LAST: Final = 5  # passes of a size whose median counts
_FEWEST: Final = 2  # passes of a size that make it known
_PAUSE: Final = 8  # steps after which to look again for guesses that pay, at first
_MOST_PAUSE: Final = 512
_RELAX: Final = 0.85  # of what was measured of guesses is believed after a pause, as a power
_TRUST: Final = 20.0  # right guesses that the chances count for as they are told
_MEMORY: Final = 0.98  # of how guesses fared, at the next step
_STREAK: Final = 32  # steps with guesses after which they are known to pay
_LARGEST: Final = 1.3  # tokens of a pass at most, as a share of those that are free
_NEVER: Final = 1e-9  # chance of a guess that there is not
_PATIENCE: Final = 3  # steps without guesses that pay before a pause


@dataclass(slots=True)
class _LatencyCurve:
    """How much longer passes took than the shape says, by size in half octaves."""

    measured: dict[int, deque[float]] = field(default_factory=dict)
    first: set[int] = field(default_factory=set)
    # The ratio at each size, or at the nearest that is known; None until it is asked for.
    ratio_of: Floats | None = None

    def add(self, tokens: int, ratio: float) -> None:
        size = _size(tokens)
        if size in self.first:
            self.measured.setdefault(size, deque(maxlen=_LAST)).append(ratio)
            self.ratio_of = None
        self.first.add(size)  # whose passes are captured or compiled

    def relax(self, other: _LatencyCurve) -> None:
        """Come closer to another curve: what was measured may have been disturbed."""
        self.ratio_of = None
        for size, last in self.measured.items():
            mine, theirs = statistics.median(last), other.ratios(np.array([2 ** (size / 2)]))
            if theirs is not None and mine > theirs[0]:
                nearer = mine**_RELAX * float(theirs[0]) ** (1 - _RELAX)
                self.measured[size] = deque([nearer] * _FEWEST, maxlen=_LAST)

    @property
    def largest(self) -> float:
        """The most tokens of a pass that was measured."""
        return float(2 ** (max(self.first, default=0) / 2))

    def ratios(self, tokens_M: Ints | Floats) -> Floats | None:
        """The ratios at the nearest sizes that are known; None if none is."""
        if self.ratio_of is None:
            known = {
                size: statistics.median(last)
                for size, last in self.measured.items()
                if len(last) >= _FEWEST
            }
            if not known:
                return None
            sizes = np.array(list(known))
            nearest = np.abs(sizes - np.arange(_SIZES)[:, None]).argmin(axis=1)
            self.ratio_of = np.array(list(known.values()))[nearest]
        found: Floats = self.ratio_of[np.rint(2 * np.log2(tokens_M)).astype(np.int64)]
        return found


def _size(tokens: int) -> int:
    return round(2 * math.log2(max(tokens, 1)))


@dataclass(frozen=True, slots=True)
class _CostEstimate:
    """What passes of some rows are expected to take.

    num_rows, most: the rows, and how many guesses each has at most.
    now: tokens for each time that the weights are read, without guesses.
    cost_M: how long a pass takes that verifies 1, 2, ... guesses, in the same unit.
    pays: whether it pays to verify guesses that are as likely as they can be.
    """

    num_rows: int
    most: int
    now: float
    cost_M: Floats
    pays: bool


class DraftLengthController:
    """Decides how many guesses of a run are verified, and when to look for any."""

    def __init__(self, free_tokens: float, weight_keys: float, multiple: int = 1) -> None:
        """A curve that nothing was measured of.

        Args:
            free_tokens: Tokens of a pass from which on computing them takes longer than reading the
                weights.
            weight_keys: Keys that take as long to read as the weights.
            multiple: Passes that verify guesses are filled up to a multiple of so many tokens.
        """
        self._free, self._keys, self._multiple = free_tokens, weight_keys, multiple
        self._plain, self._verified = _LatencyCurve(), _LatencyCurve()
        self._pause = self._next_pause = _PAUSE
        self._idle = self._streak = 0  # steps without guesses that pay, and with
        # Guesses that were expected to be right, and those that were, of late.
        self._expected = self._right = _TRUST
        self._outlook: _CostEstimate | None = None

    def begin(self) -> None:
        """Look for guesses soon, for another run begins."""
        self._pause, self._next_pause = _PAUSE, min(self._next_pause, 4 * _PAUSE)
        self._idle = self._streak = 0

    def record_accepted(self, expected: float, right: int) -> None:
        """Note how many guesses of a step were right, and how many had been expected to be."""
        self._expected = _MEMORY * self._expected + expected
        self._right = _MEMORY * self._right + right

    def measure(self, tokens: int, keys: int, seconds: float, *, verified: bool) -> None:
        """Note what a pass took. keys: that it read for each layer."""
        curve = self._verified if verified else self._plain
        if verified:
            tokens = -(-tokens // self._multiple) * self._multiple
        curve.add(tokens, seconds / float(self._shape(np.array([tokens]), keys)[0]))

    def is_due(self, num_rows: int, keys: int, most: int) -> bool:
        """Whether to look for guesses before the next step of some rows."""
        if num_rows >= self._free:
            return False
        if self._pause > 0:
            self._pause -= 1
            return False
        if self._get_costs(num_rows, keys, most).pays:
            return True
        self._wait()
        return False

    def _wait(self) -> None:
        """Look for guesses again after some steps, ever more of them."""
        self._outlook = None
        self._verified.relax(self._plain)
        self._pause, self._idle, self._streak = self._next_pause, 0, 0
        self._next_pause = min(2 * self._next_pause, _MOST_PAUSE)

    def choose_lengths(
        self, num_R: Ints, chance_R: Floats, keys: int, most: int, later_R: Floats | None = None
    ) -> tuple[Ints, float]:
        """How many of its guesses to verify of each row, and how many should be right in all.

        Args:
            num_R: How many each has.
            chance_R: How likely the first is right.
            later_R: How likely each further one is, if those before it were; None for as likely.
        """
        chance_RK = np.empty((len(num_R), most))
        chance_RK[:] = (chance_R if later_R is None else later_R)[:, None]
        chance_RK[:, 0] = chance_R * (1 - 1e-6 * np.arange(len(num_R)))  # so that no two are equal
        gain_RK = chance_RK.cumprod(axis=1)
        gain_RK[np.arange(most) >= num_R[:, None]] = 0.0
        outlook = self._get_costs(len(num_R), keys, most)
        self._outlook = None  # what is measured meanwhile changes it
        gains_M = np.sort(gain_RK, axis=None)[: -len(outlook.cost_M) - 1 : -1]
        sums_M = gains_M.cumsum()
        best = self._best(outlook, sums_M * (self._right / self._expected))
        if best is None:
            self._idle += 1
            if self._idle >= _PATIENCE:
                self._wait()
            return np.zeros_like(num_R), 0.0
        self._idle, self._streak = 0, self._streak + 1
        if self._streak > _STREAK:
            self._next_pause = _PAUSE
        least = max(float(gains_M[best]), _NEVER)
        chosen: Ints = (gain_RK >= least).sum(axis=1)
        return chosen, float(sums_M[best])

    @staticmethod
    def _best(outlook: _CostEstimate, sums_M: Floats) -> int | None:
        """Which number of guesses is the best, those with the largest gains first.

        Args:
            sums_M: The tokens that 1, 2, ... guesses add on average.
        """
        if not len(sums_M):
            return None
        rate_M = (outlook.num_rows + sums_M) / outlook.cost_M[: len(sums_M)]
        best = int(rate_M.argmax())
        return best if rate_M[best] > _GAIN * outlook.now else None

    def _get_costs(self, num_rows: int, keys: int, most: int) -> _CostEstimate:
        """What passes will take, as it was looked up for as many rows since the last step."""
        outlook = self._outlook
        if outlook is None or (outlook.num_rows, outlook.most) != (num_rows, most):
            self._outlook = outlook = self._estimate_costs(num_rows, keys, most)
        return outlook

    def _estimate_costs(self, num_rows: int, keys: int, most: int) -> _CostEstimate:
        rows = np.array([num_rows])
        # Passes are tried that are somewhat larger than those that were measured.
        largest = 2 * max(num_rows, self._verified.largest)
        largest = min(max(largest, self._multiple), _LARGEST * self._free)
        tokens_M = num_rows + np.arange(1, min(int(largest) - num_rows, num_rows * most) + 1)
        tokens_M = -(-tokens_M // self._multiple) * self._multiple
        plain = self._plain.ratios(rows)
        if not len(tokens_M):
            return _CostEstimate(num_rows, most, 1.0, np.empty(0), pays=False)
        verified_M = self._verified.ratios(tokens_M)
        if plain is None:
            plain = np.ones(1) if verified_M is None else verified_M[:1] / _UNKNOWN
        if verified_M is None:
            like_M = self._plain.ratios(tokens_M)
            verified_M = _UNKNOWN * (plain if like_M is None else like_M)
        cost_M = verified_M * self._shape(tokens_M, keys)
        now = num_rows / float((plain * self._shape(rows, keys))[0])
        found = _CostEstimate(num_rows, most, now, cost_M, pays=True)
        likely_M = _LIKELY * np.arange(1.0, len(cost_M) + 1)
        return replace(found, pays=self._best(found, likely_M) is not None)

    def _shape(self, tokens: Ints, keys: int) -> Floats:
        """What passes take, in times that the weights are read."""
        found: Floats = np.maximum(1.0, tokens / self._free) + keys / self._keys
        return found
