"""Chooses how many draft tokens to verify in a pass, from estimates of the time of passes.

A pass reads the weights once, whatever its number of tokens. So further tokens cost nothing until
computing takes longer than reading. This gives the shape of the latency curve. Measured passes give
its height near the measured numbers of tokens, separately for steps of one token per row and for
steps that verify drafts.

Legend: R rows, K draft tokens of a row, M draft tokens of all rows.
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

_MIN_SPEEDUP: Final = 1.04  # drafts are verified if the expected speedup is at least this factor
_BEST_RATE: Final = 0.85  # assumed acceptance rate at best, while there are no drafts
_VERIFY_FACTOR: Final = 1.05  # assumed ratio of the times of a verification and a decode pass
_NUM_SIZES: Final = 64  # classes of pass sizes, each half an octave of tokens wide
_NUM_RECENT: Final = 5  # number of last passes of a size whose median is used
_MIN_PASSES: Final = 2  # number of passes after which the time of a size is known
_FIRST_PAUSE: Final = 8  # steps without drafts in the first pause
_MAX_PAUSE: Final = 512  # steps without drafts in the longest pause
_RELAX_EXPONENT: Final = 0.85  # weight of measured times of drafts after a pause, as an exponent
_PRIOR_WEIGHT: Final = 20.0  # prior weight of the predicted rates, in accepted draft tokens
_DECAY: Final = 0.98  # weight of earlier acceptances, relative to the next step
_LONG_STREAK: Final = 32  # steps with drafts after which drafts are known to pay
_MAX_SIZE: Final = 1.3  # maximum number of tokens of a pass, relative to the free tokens
_ZERO: Final = 1e-9  # probability of a draft token that does not exist
_MAX_IDLE_STEPS: Final = 3  # steps without drafts that pay before a pause


@dataclass(slots=True)
class _LatencyCurve:
    """Ratios of measured to predicted times of passes, by size in half octaves."""

    measured: dict[int, deque[float]] = field(default_factory=dict)
    first: set[int] = field(default_factory=set)
    # The ratio at each size, or at the nearest known size; None until `ratios` computes it.
    ratio_of: Floats | None = None

    def add(self, tokens: int, ratio: float) -> None:
        size = round(2 * math.log2(max(tokens, 1)))
        if size in self.first:
            self.measured.setdefault(size, deque(maxlen=_NUM_RECENT)).append(ratio)
            self.ratio_of = None
        self.first.add(size)  # the first pass of a size is not used: it captures or compiles

    def relax(self, other: _LatencyCurve) -> None:
        """Move closer to another curve, because measured times may have been disturbed."""
        self.ratio_of = None
        for size, last in self.measured.items():
            own_ratio = statistics.median(last)
            other_ratios = other.ratios(np.array([2 ** (size / 2)]))
            if other_ratios is not None and own_ratio > (other_ratio := float(other_ratios[0])):
                mean = own_ratio**_RELAX_EXPONENT * other_ratio ** (1 - _RELAX_EXPONENT)
                self.measured[size] = deque([mean] * _MIN_PASSES, maxlen=_NUM_RECENT)

    @property
    def largest(self) -> float:
        """The largest number of tokens of a measured pass."""
        return float(2 ** (max(self.first, default=0) / 2))

    def ratios(self, tokens_M: Ints | Floats) -> Floats | None:
        """Return the ratios at the nearest known sizes; None if no size is known."""
        if self.ratio_of is None:
            medians = {
                size: statistics.median(last)
                for size, last in self.measured.items()
                if len(last) >= _MIN_PASSES
            }
            if not medians:
                return None
            sizes = np.array(list(medians))
            nearest = np.abs(sizes - np.arange(_NUM_SIZES)[:, None]).argmin(axis=1)
            self.ratio_of = np.array(list(medians.values()))[nearest]
        ratios_M: Floats = self.ratio_of[np.rint(2 * np.log2(tokens_M)).astype(np.int64)]
        return ratios_M


@dataclass(frozen=True, slots=True)
class _CostEstimate:
    """Expected times of passes over some rows, in units of the time of reading the weights."""

    num_rows: int
    """Number of rows."""
    max_drafts: int
    """Maximum number of draft tokens of each row."""
    now: float
    """Tokens per unit of time without drafts."""
    cost_M: Floats
    """Time of a pass that verifies 1, 2, ... draft tokens."""
    is_profitable: bool
    """Whether verifying drafts saves time with the best acceptance rate."""


class DraftLengthController:
    """Decides how many draft tokens of a run are verified, and when to propose any."""

    def __init__(self, free_tokens: float, weight_keys: float, multiple: int = 1) -> None:
        """Set up a controller without measurements.

        Args:
            free_tokens: Number of tokens of a pass from which on computing takes longer than
                reading the weights.
            weight_keys: Number of keys that take as long to read as the weights.
            multiple: Passes that verify drafts are padded to a multiple of this number of tokens.
        """
        self._free_tokens, self._weight_keys, self._multiple = free_tokens, weight_keys, multiple
        self._decode_curve, self._verify_curve = _LatencyCurve(), _LatencyCurve()
        self._pause = self._next_pause = _FIRST_PAUSE
        self._idle = self._streak = 0  # consecutive steps without and with drafts that pay
        # Decayed counts of draft tokens that were expected to be accepted, and that were accepted.
        self._expected = self._accepted = _PRIOR_WEIGHT
        self._costs: _CostEstimate | None = None

    def begin(self) -> None:
        """Propose drafts soon, because another run begins."""
        self._pause, self._next_pause = _FIRST_PAUSE, min(self._next_pause, 4 * _FIRST_PAUSE)
        self._idle = self._streak = 0

    def record_accepted(self, expected: float, accepted: int) -> None:
        """Record the expected and the real number of accepted draft tokens of a step."""
        self._expected = _DECAY * self._expected + expected
        self._accepted = _DECAY * self._accepted + accepted

    def measure(self, tokens: int, keys: int, seconds: float, *, verified: bool) -> None:
        """Record the time of a pass.

        Args:
            tokens: Number of tokens of the pass.
            keys: Number of keys that it read in each layer.
            seconds: Its time.
            verified: Whether it verified draft tokens.
        """
        curve = self._verify_curve if verified else self._decode_curve
        if verified:
            tokens = -(-tokens // self._multiple) * self._multiple
        curve.add(tokens, seconds / float(self._predict_times(np.array([tokens]), keys)[0]))

    def is_due(self, num_rows: int, keys: int, max_drafts: int) -> bool:
        """Return whether to propose draft tokens before the next step.

        Args:
            num_rows: Number of rows of the step.
            keys: Number of keys that the last step read in each layer.
            max_drafts: Maximum number of draft tokens of each row.
        """
        if num_rows >= self._free_tokens:
            return False
        if self._pause > 0:
            self._pause -= 1
            return False
        if self._get_costs(num_rows, keys, max_drafts).is_profitable:
            return True
        self._start_pause()
        return False

    def _start_pause(self) -> None:
        """Pause drafting; each pause is twice as long as the last one, up to a maximum."""
        self._costs = None
        self._verify_curve.relax(self._decode_curve)
        self._pause, self._idle, self._streak = self._next_pause, 0, 0
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    def choose_lengths(
        self,
        num_R: Ints,
        chance_R: Floats,
        keys: int,
        max_drafts: int,
        later_R: Floats | None = None,
    ) -> tuple[Ints, float]:
        """Choose how many draft tokens of each row to verify.

        Args:
            num_R: Number of draft tokens of each row, [R].
            chance_R: Probability that the first one is accepted, [R].
            keys: Number of keys that the last step read in each layer.
            max_drafts: Maximum number of draft tokens of each row.
            later_R: Probability that each further one is accepted if the ones before it were, [R];
                None if it is that of the first.

        Returns:
            The number for each row, [R], and how many are expected to be accepted in all.
        """
        chance_RK = np.empty((len(num_R), max_drafts))
        chance_RK[:] = (chance_R if later_R is None else later_R)[:, None]
        chance_RK[:, 0] = chance_R * (1 - 1e-6 * np.arange(len(num_R)))  # breaks ties
        gain_RK = chance_RK.cumprod(axis=1)
        gain_RK[np.arange(max_drafts) >= num_R[:, None]] = 0.0
        costs = self._get_costs(len(num_R), keys, max_drafts)
        self._costs = None  # later measurements change it
        gains_M = np.sort(gain_RK, axis=None)[: -len(costs.cost_M) - 1 : -1]
        sums_M = gains_M.cumsum()
        best = self._find_best(costs, sums_M * (self._accepted / self._expected))
        if best is None:
            self._idle += 1
            if self._idle >= _MAX_IDLE_STEPS:
                self._start_pause()
            return np.zeros_like(num_R), 0.0
        self._idle, self._streak = 0, self._streak + 1
        if self._streak > _LONG_STREAK:
            self._next_pause = _FIRST_PAUSE
        min_gain = max(float(gains_M[best]), _ZERO)
        chosen: Ints = (gain_RK >= min_gain).sum(axis=1)
        return chosen, float(sums_M[best])

    @staticmethod
    def _find_best(costs: _CostEstimate, sums_M: Floats) -> int | None:
        """Return the index of the best number of draft tokens; None if none saves time.

        Args:
            costs: Expected times of passes.
            sums_M: Expected accepted tokens of the 1, 2, ... most likely draft tokens.
        """
        if not len(sums_M):
            return None
        rate_M = (costs.num_rows + sums_M) / costs.cost_M[: len(sums_M)]
        best = int(rate_M.argmax())
        return best if rate_M[best] > _MIN_SPEEDUP * costs.now else None

    def _get_costs(self, num_rows: int, keys: int, max_drafts: int) -> _CostEstimate:
        """Return the expected times of passes; they are computed once per step."""
        costs = self._costs
        if costs is None or (costs.num_rows, costs.max_drafts) != (num_rows, max_drafts):
            self._costs = costs = self._estimate_costs(num_rows, keys, max_drafts)
        return costs

    def _estimate_costs(self, num_rows: int, keys: int, max_drafts: int) -> _CostEstimate:
        rows = np.array([num_rows])
        # Passes may be up to twice as large as the largest measured one.
        largest = 2 * max(num_rows, self._verify_curve.largest)
        largest = min(max(largest, self._multiple), _MAX_SIZE * self._free_tokens)
        tokens_M = num_rows + np.arange(1, min(int(largest) - num_rows, num_rows * max_drafts) + 1)
        tokens_M = -(-tokens_M // self._multiple) * self._multiple
        plain = self._decode_curve.ratios(rows)
        if not len(tokens_M):
            return _CostEstimate(num_rows, max_drafts, 1.0, np.empty(0), is_profitable=False)
        verified_M = self._verify_curve.ratios(tokens_M)
        if plain is None:
            plain = np.ones(1) if verified_M is None else verified_M[:1] / _VERIFY_FACTOR
        if verified_M is None:
            like_M = self._decode_curve.ratios(tokens_M)
            verified_M = _VERIFY_FACTOR * (plain if like_M is None else like_M)
        cost_M = verified_M * self._predict_times(tokens_M, keys)
        now = num_rows / float((plain * self._predict_times(rows, keys))[0])
        estimate = _CostEstimate(num_rows, max_drafts, now, cost_M, is_profitable=True)
        likely_M = _BEST_RATE * np.arange(1.0, len(cost_M) + 1)
        return replace(estimate, is_profitable=self._find_best(estimate, likely_M) is not None)

    def _predict_times(self, tokens: Ints, keys: int) -> Floats:
        """Return the predicted times of passes, in units of the time of reading the weights."""
        shape: Floats = np.maximum(1.0, tokens / self._free_tokens) + keys / self._weight_keys
        return shape


_INITIAL_RATE: Final = 0.7  # estimate before any draft token was tried
_RATE_PRIOR_WEIGHT: Final = 8.0  # prior weight of that estimate, in tried tokens
_RATE_DECAY: Final = 0.99  # weight of earlier steps, relative to the next step


class SingleRateDrafter:
    """A drafter whose draft tokens are all of one kind, with one acceptance rate."""

    def __init__(self) -> None:
        """Set up a drafter before any draft token was tried."""
        self._accepted, self._tried = _INITIAL_RATE * _RATE_PRIOR_WEIGHT, _RATE_PRIOR_WEIGHT

    @property
    def acceptance_rate(self) -> float:
        """The decayed share of tried draft tokens that were accepted, with a prior."""
        return self._accepted / self._tried

    def run_deferred(self) -> None:
        """Do nothing: this drafter defers no work."""

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """Update the estimated acceptance rate.

        Args:
            kind_R: Not used; this drafter has one kind of draft tokens.
            tried_R: Number of tried draft tokens of each row, [R].
            accepted_R: Number of accepted draft tokens of each row, [R].
        """
        self._tried = _RATE_DECAY * self._tried + int(tried_R.sum())
        self._accepted = _RATE_DECAY * self._accepted + int(accepted_R.sum())
