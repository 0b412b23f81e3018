"""Estimates the final lengths of rows, and which rows can start in addition to active ones.

A row takes pages as it grows, and its limit may be far more than it ever needs. So rows start if
the pages are expected to last, and are preempted if they do not. The estimate uses the lengths of
the rows that have ended. A row that is longer than most is expected to grow by half of its length.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.segments.segment import LiveRequest
from treegen.prompts.plan.plan import row_pages

_UNKNOWN: Final = 512  # expected tokens of a row while no row has ended
_MOMENTS: Final = 8  # future moments at which pages are counted


class PageDemandEstimator:
    """Estimates lengths and pages of the rows of one run."""

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row has ended yet."""
        self._run, self._page_size = run, run.cache.page_size
        self._ended_rows = self._ended_tokens = 0
        self._passed_over = -1, 0  # a row's serial number, and how many rows started before it

    def record_lengths(self, slots: Ints) -> None:
        """Record the lengths of rows that have ended."""
        self._ended_rows += len(slots)
        self._ended_tokens += int(self._run.rows.count[slots].sum())

    def estimate_pages(self, slots: Ints) -> int:
        """Return the number of pages that rows are still expected to take."""
        return int(self._pages(slots, self._lengths(slots)).sum())

    def estimate_new_row_pages(self, request: LiveRequest) -> int:
        """Return the number of pages that a new row of a request is expected to take."""
        length = int(
            self._estimate_lengths(np.zeros(1, np.int64), np.array([request.spec.max_tokens]))[0]
        )
        segment = request.segment
        return row_pages(segment.base_below, segment.stop, length, self._page_size)

    def select_startable(self, ready: Ints, active: Ints, num_free: int) -> Ints:
        """Return the ready rows, in their order, that can start in addition to active ones.

        They can if the free pages are expected to last until rows end and free theirs. Rows that
        fit may start before one that does not, such as a long row that was preempted. At most
        `max_rows` rows start before it.

        Args:
            ready: Slots of ready rows, depth first.
            active: Slots of active rows.
            num_free: Number of free pages.
        """
        rows, num = self._run.rows, len(active)
        slots = np.concatenate([active, ready])
        remaining_R = np.maximum(self._lengths(slots) - rows.count[slots], 1)
        moments_M1 = np.unique(np.append(_sample_sorted(remaining_R), 1))[:, None]
        more_MR = self._pages(slots, rows.count[slots] + np.minimum(remaining_R, moments_M1))
        # Rows that end before a moment have freed their pages by then.
        there_MR = remaining_R >= moments_M1
        above = rows.stop[active] - rows.base[active]
        num_owned = rows.num_pages[active] - above // self._page_size
        taken_MR = np.where(there_MR[:, :num], more_MR[:, :num], -num_owned)
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
        """Return how many rows may still start before the row with a serial number."""
        if self._passed_over[0] != serial:
            self._passed_over = serial, 0
        return max(self._run.max_rows - self._passed_over[1], 0)

    def _lengths(self, slots: Ints) -> Ints:
        """Return the number of tokens that each row is expected to have at its end."""
        return self._estimate_lengths(self._run.rows.count[slots], self._run.rows.limit[slots])

    def _estimate_lengths(self, count: Ints, limit: Ints) -> Ints:
        if self._ended_rows:
            mean = int(1.25 * self._ended_tokens / self._ended_rows)
            guess = np.maximum(count + count // 2, mean) + self._page_size
        else:
            guess = np.maximum(2 * count, _UNKNOWN)
        least: Ints = np.minimum(limit, guess)
        return least

    def _pages(self, slots: Ints, length: Ints) -> Ints:
        """Return the further pages that rows take until they have some numbers of tokens.

        Args:
            slots: Slots of the rows, [rows].
            length: Numbers of tokens, [..., rows].
        """
        rows, size = self._run.rows, self._page_size
        base = rows.base[slots]
        have = np.maximum(rows.num_pages[slots], (rows.stop[slots] - base) // size)
        more = -(-(rows.stop[slots] + length - 1 - base) // size) - have
        needed: Ints = np.maximum(more, 0, dtype=np.int64)
        return needed


def _sample_sorted(values: Ints) -> Ints:
    """Return a sample of the values, evenly spaced in sorted order."""
    at = np.linspace(0, len(values) - 1, _MOMENTS).astype(np.int64)
    sample: Ints = np.sort(values)[at]
    return sample


def _count_fitting(needs_MR: Ints, room_M: Ints) -> int:
    """Return how many rows, from the first on, together fit into the room at every moment."""
    fits = np.asarray((needs_MR.cumsum(axis=1) <= room_M[:, None]).all(axis=0))
    return len(fits) if fits.all() else int(fits.argmin())
