"""How long rows are expected to become, and which of them may start beside those that run.

A row takes pages as it grows, and its limit may be far more than it ever needs. So rows start if
the pool is expected to last, and give way if it does not. Rows that have ended are the measure. A
row that is longer than most is expected to go on for half of its length.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.segments.segment import LiveRequest
from treegen.prompts.plan.plan import row_pages

_UNKNOWN: Final = 512  # tokens that a row is expected to have while none has ended
_MOMENTS: Final = 8  # moments to come at which pages are counted


class PageDemandEstimator:
    """Expectations about the rows of one run."""

    def __init__(self, run: EngineRun) -> None:
        """No row has ended."""
        self._run, self._page_size = run, run.cache.page_size
        self._ended_rows = self._ended_tokens = 0
        self._passed_over = -1, 0  # a row's serial number, and how many rows have passed it

    def record_lengths(self, slots: Ints) -> None:
        """Note the lengths of rows that have ended."""
        self._ended_rows += len(slots)
        self._ended_tokens += int(self._run.rows.count[slots].sum())

    def estimate_pages(self, slots: Ints) -> int:
        """Pages that rows are still expected to take."""
        return int(self._pages(slots, self._lengths(slots)).sum())

    def estimate_new_row_pages(self, request: LiveRequest) -> int:
        """Pages that a new row of a request is expected to take."""
        length = int(self._guess(np.zeros(1, np.int64), np.array([request.spec.max_tokens]))[0])
        segment = request.segment
        return row_pages(segment.base_below, segment.stop, length, self._page_size)

    def select_startable(self, ready: Ints, active: Ints, num_free: int) -> Ints:
        """The rows, out of ready ones in their order, that may start beside active ones.

        They may if the free pages are expected to last until rows end and give theirs back. Rows
        for which there is room may pass one for which there is none, as one that had to give way
        when it was long. No more of them pass it than rows run at most.
        """
        rows, num = self._run.rows, len(active)
        slots = np.concatenate([active, ready])
        left = np.maximum(self._lengths(slots) - rows.count[slots], 1)
        moments_M1 = np.unique(np.append(_sample_sorted(left), 1))[:, None]
        more_MR = self._pages(slots, rows.count[slots] + np.minimum(left, moments_M1))
        # Rows that end before a moment have given their pages back by then.
        there_MR = left >= moments_M1
        own = rows.num_pages[active] - (rows.stop[active] - rows.base[active]) // self._page_size
        taken_MR = np.where(there_MR[:, :num], more_MR[:, :num], -own)
        room_M = num_free - taken_MR.sum(axis=1)
        needs_MR = np.where(there_MR[:, num:], more_MR[:, num:], 0)
        chosen = _count_fitting(needs_MR, room_M)
        if chosen < len(ready) and (most := self._may_pass(int(rows.serial[ready[chosen]]))):
            room_M -= needs_MR[:, :chosen].sum(axis=1)
            fits = (needs_MR <= room_M[:, None]).all(axis=0)
            behind = np.flatnonzero(fits & (np.arange(len(ready)) > chosen))
            passing = behind[: min(_count_fitting(needs_MR[:, behind], room_M), most)]
            self._passed_over = self._passed_over[0], self._passed_over[1] + len(passing)
            return np.concatenate([ready[:chosen], ready[passing]])
        return ready[:chosen]

    def _may_pass(self, serial: int) -> int:
        """How many rows may pass the row with a serial number."""
        if self._passed_over[0] != serial:
            self._passed_over = serial, 0
        return max(self._run.max_rows - self._passed_over[1], 0)

    def _lengths(self, slots: Ints) -> Ints:
        """How many tokens each row is expected to have at its end."""
        return self._guess(self._run.rows.count[slots], self._run.rows.limit[slots])

    def _guess(self, count: Ints, limit: Ints) -> Ints:
        if self._ended_rows:
            mean = int(1.25 * self._ended_tokens / self._ended_rows)
            guess = np.maximum(count + count // 2, mean) + self._page_size
        else:
            guess = np.maximum(2 * count, _UNKNOWN)
        least: Ints = np.minimum(limit, guess)
        return least

    def _pages(self, slots: Ints, length: Ints) -> Ints:
        """Pages that rows take, beside those they have, until they have some numbers of tokens.

        Args:
            length: [..., rows].
        """
        rows, size = self._run.rows, self._page_size
        base = rows.base[slots]
        have = np.maximum(rows.num_pages[slots], (rows.stop[slots] - base) // size)
        more = -(-(rows.stop[slots] + length - 1 - base) // size) - have
        needed: Ints = np.maximum(more, 0, dtype=np.int64)
        return needed


def _sample_sorted(values: Ints) -> Ints:
    """Some of the values, from the least to the greatest."""
    at = np.linspace(0, len(values) - 1, _MOMENTS).astype(np.int64)
    found: Ints = np.sort(values)[at]
    return found


def _count_fitting(needs_MR: Ints, room_M: Ints) -> int:
    """How many rows, from the first on, need no more than there is at any moment."""
    fits = np.asarray((needs_MR.cumsum(axis=1) <= room_M[:, None]).all(axis=0))
    return len(fits) if fits.all() else int(fits.argmin())
