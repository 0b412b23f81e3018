"""Moves rows between phases, and manages their queues and their pages.

A row takes pages as it grows, and its limit may be far more than it ever needs. So rows start if
the pages are expected to last, and are preempted if they do not. The estimate uses the lengths of
the rows that have ended. A row that is longer than most is expected to grow by half of its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.rows.engine_run import EngineRun, RowFeature, RowStates
from treegen.engine.rows.table import RowPhase
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.ops.cache.pool import Pages
from treegen.prompts.plan.draws import sample_seed
from treegen.prompts.plan.plan import row_pages

_DEFAULT_LENGTH: Final = 512  # expected tokens of a row while no row has ended
_NUM_MOMENTS: Final = 8  # future moments at which pages are counted


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

        A row can start if the free pages are expected to last until rows end and free their pages.
        If a row does not fit, such as a long row that was preempted, later rows that fit may start
        before it, but at most `max_rows` of them.

        Args:
            ready: Slots of ready rows, depth first.
            active: Slots of active rows.
            num_free: Number of free pages.
        """
        rows, num = self._run.rows, len(active)
        slots = np.concatenate([active, ready])
        remaining_R = np.maximum(self._lengths(slots) - rows.count[slots], 1)
        moments_M1 = np.unique(np.append(_sample_sorted(remaining_R), 1))[:, None]
        new_pages_MR = self._pages(slots, rows.count[slots] + np.minimum(remaining_R, moments_M1))
        # Rows that end before a moment have freed their pages by then.
        is_running_MR = remaining_R >= moments_M1
        above = rows.stop[active] - rows.base[active]
        num_owned = rows.num_pages[active] - above // self._page_size
        taken_MR = np.where(is_running_MR[:, :num], new_pages_MR[:, :num], -num_owned)
        free_M = num_free - taken_MR.sum(axis=1)
        needs_MR = np.where(is_running_MR[:, num:], new_pages_MR[:, num:], 0)
        chosen = _count_fitting(needs_MR, free_M)
        if chosen < len(ready) and (max_passing := self._may_pass(int(rows.serial[ready[chosen]]))):
            free_M -= needs_MR[:, :chosen].sum(axis=1)
            fits = (needs_MR <= free_M[:, None]).all(axis=0)
            later_fitting = np.flatnonzero(fits & (np.arange(len(ready)) > chosen))
            num_fitting = _count_fitting(needs_MR[:, later_fitting], free_M)
            passing = later_fitting[: min(num_fitting, max_passing)]
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
            guess = np.maximum(2 * count, _DEFAULT_LENGTH)
        expected: Ints = np.minimum(limit, guess)
        return expected

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
    at = np.linspace(0, len(values) - 1, _NUM_MOMENTS).astype(np.int64)
    sample: Ints = np.sort(values)[at]
    return sample


def _count_fitting(needs_MR: Ints, free_M: Ints) -> int:
    """Return how many rows, from the first on, together fit into the free pages at every moment."""
    fits = np.asarray((needs_MR.cumsum(axis=1) <= free_M[:, None]).all(axis=0))
    return len(fits) if fits.all() else int(fits.argmin())


_RETRY_CALLS: Final = 16  # calls of `activate` after which it tries again, 1 to 3 in a step
_KEY_BITS: Final = 32  # low bits of a sort key: the sample index; high bits: the request's rank
# Added to a sort key, this sorts a row after the first samples of the next request.
_LATE_OFFSET: Final = 3 << (_KEY_BITS - 1)

FREE, DRAWN, PARKED, READY, RESUMING, LIVE, ENDED = RowPhase

_NEXT: Final = {
    FREE: [DRAWN],
    DRAWN: [PARKED, ENDED, FREE],
    PARKED: [READY, FREE],
    READY: [RESUMING, LIVE, PARKED, FREE],
    RESUMING: [LIVE, READY, FREE],
    LIVE: [READY, ENDED, FREE],
    ENDED: [FREE],
}
ALLOWED: Final = np.array([[after in _NEXT[before] for before in RowPhase] for after in RowPhase])


class RowQueue:
    """Moves the rows of a run from phase to phase; no other class does.

    Attributes:
        live_slots: LIVE slots, depth first. It is never changed in place: new rows make a new
            array, so that `DecodeSteps` can compare arrays by identity.
        ready: READY slots, depth first.
        resuming: For each RESUMING slot, the position up to which its keys are computed.
        states: Recurrent states of the rows.
        features: Features that set up new rows.
    """

    def __init__(
        self,
        run: EngineRun,
        states: RowStates,
        features: Sequence[RowFeature],
        *,
        early_samples: int = 0,
    ) -> None:
        """Set up a run without rows.

        Args:
            run: Shared state of the run.
            states: Recurrent states of the rows.
            features: Features that set up new rows.
            early_samples: Number of samples of each request that start early, together with the
                previous request's samples. Their tokens can then be drafts for the request's other
                samples. 0 keeps the requests in order.
        """
        self._num_early = early_samples
        self._run, self.states, self.features = run, states, list(features)
        self._pool, self._page_size = run.pool, run.cache.page_size
        self.live_slots: Ints = np.empty(0, dtype=np.int64)
        self.resuming: dict[int, int] = {}
        self.ready: Ints = np.empty(0, dtype=np.int64)
        self.page_demand = PageDemandEstimator(run)
        # The situation in which no row could start, and the number of calls until the next attempt.
        self._failed_attempt, self._calls_to_retry = (-1, -1, -1), 0

    @property
    def num_active(self) -> int:
        """Number of rows that hold pages."""
        return len(self.live_slots) + len(self.resuming)

    def active(self) -> Ints:
        """Return the slots that hold pages."""
        return np.concatenate([self.live_slots, np.fromiter(self.resuming, dtype=np.int64)])

    def tables(self) -> Iterator[Pages]:
        """Return the page tables of all rows, for the pool's check."""
        return (self._run.rows.table[s, : self._run.rows.num_pages[s]] for s in self.active())

    def select(self, requests: Iterable[LiveRequest], phase: RowPhase) -> Ints:
        """Return the slots of those rows of requests that are in a phase."""
        all_slots = [slot for request in requests for slot in request.slots or ()]
        slots: Ints = np.array(all_slots, dtype=np.int64)
        selected: Ints = slots[self._run.rows.phase[slots] == phase]
        return selected

    def _move(self, slots: Ints, phase: RowPhase) -> None:
        """Set the phase of rows; the table of `RowPhase` lists the allowed changes."""
        phases = self._run.rows.phase
        assert ALLOWED[phase, phases[slots]].all(), f"a row may not become {phase.name}"
        phases[slots] = phase

    def add(self, requests: Sequence[LiveRequest], num_rows: int) -> Ints:
        """Add `num_rows` rows to each request; their first tokens are about to be drawn.

        Returns:
            Slots of the rows, [requests, num_rows].
        """
        rows = self._run.rows
        slots_PN = rows.add(len(requests) * num_rows).reshape(len(requests), num_rows)
        self._move(slots_PN, DRAWN)
        samples = [request.samples[:num_rows] for request in requests]
        columns = {
            "request": [request.index for request in requests],
            "params": [request.params for request in requests],
            "stop": [request.segment.stop for request in requests],
            "limit": [request.spec.max_tokens for request in requests],
            "shift": [self._run.store.shift_after(request.segment) for request in requests],
        }
        for name, values in columns.items():
            getattr(rows, name)[slots_PN] = np.array(values)[:, None]
        ranks = np.array([request.rank for request in requests])
        rows.sample[slots_PN] = samples
        rows.key[slots_PN] = (ranks << _KEY_BITS)[:, None] + rows.sample[slots_PN]
        if self._num_early:
            rows.key[slots_PN[:, self._num_early :]] += _LATE_OFFSET
        run_seeds = [self._run.param_sets[request.params].params.seed for request in requests]
        rows.seed[slots_PN] = [
            [sample_seed(run_seed, request.spec, index) for index in indices]
            for run_seed, request, indices in zip(run_seeds, requests, samples, strict=True)
        ]
        for feature in self.features:
            feature.begin(requests, slots_PN)
        for request, slots in zip(requests, slots_PN.tolist(), strict=True):
            request.slots = set(slots)
            request.recomputed_segment = None
        return slots_PN

    def park(self, slots: Ints) -> None:
        """Make rows wait for the keys of their prompts."""
        self._move(slots, PARKED)
        self._drop_moved()

    def enqueue(self, slots: Ints) -> None:
        """Make rows wait for pages."""
        self._move(slots, READY)
        self._enqueue(slots)

    def _enqueue(self, slots: Ints) -> None:
        ready = np.concatenate([self.ready, slots])
        self.ready = ready[self._run.rows.key[ready].argsort()]

    def _drop_moved(self) -> None:
        """Drop rows that are no longer READY or LIVE from `ready` and `live_slots`."""
        phase = self._run.rows.phase
        is_in_phase = phase[self.ready] == READY
        if not is_in_phase.all():
            self.ready = self.ready[is_in_phase]
        is_in_phase = phase[self.live_slots] == LIVE
        if not is_in_phase.all():
            self.live_slots = self.live_slots[is_in_phase]

    def _by_segment(self, slots: Ints) -> Iterator[tuple[LiveSegment, slice]]:
        """Yield the segment of each request of slots, and the slice of its slots."""
        requests = self._run.rows.request[slots]
        starts = np.flatnonzero(np.diff(requests, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            yield self._run.requests[int(requests[start])].segment, slice(start, stop)

    def _count_siblings(self, slots: Ints) -> Ints:
        """Return the number of rows of each slot's request."""
        indices, inverse = np.unique(self._run.rows.request[slots], return_inverse=True)
        requests = (self._run.requests[index] for index in indices.tolist())
        return np.array([request.num_rows for request in requests], dtype=np.int64)[inverse]

    def activate(self, max_rows: int) -> None:
        """Allocate pages for ready rows, depth first, while the pool is expected to last.

        For rows of requests that were added to the run, idle segments are evicted to make room.
        """
        while len(self.ready) and self.num_active < max_rows:
            slots = self.ready[: max_rows - self.num_active]
            # If no row could start, none can until pages are freed or active rows come nearer to
            # their end. Trying again in each call would take too long.
            attempt = self._pool.num_freed, len(slots), int(slots[0])
            self._calls_to_retry -= 1
            if attempt == self._failed_attempt and self._calls_to_retry > 0 and self.num_active:
                return
            # The segment above may have become a cascaded one since the rows were made ready.
            for segment, part in self._by_segment(slots):
                self._run.rows.base[slots[part]] = segment.base_below
            chosen = self.page_demand.select_startable(slots, self.active(), self._pool.num_free)
            chosen = chosen[: self.states.count_startable(chosen, self._count_siblings)]
            if len(chosen):
                self._start(chosen)
            else:
                request = self._run.requests[int(self._run.rows.request[slots[0]])]
                # A run that accepts requests keeps idle segments, which are evicted before a row
                # has to wait.
                if not request.added or not self._run.store.evict_idle():
                    self._failed_attempt, self._calls_to_retry = attempt, _RETRY_CALLS
                    return

    def _start(self, slots: Ints) -> None:
        """Allocate the pages that ready rows need now, and make these rows active."""
        rows, pool, size = self._run.rows, self._pool, self._page_size
        self.ready = self.ready[~np.isin(self.ready, slots)]
        # A row's table may begin with tokens of folded segments above it. The row shares their full
        # pages, and copies a last page that is not full.
        above = rows.stop[slots] - rows.base[slots]
        num_shared, num_copied = above // size, above % size
        source = np.zeros(len(slots), dtype=np.int64)
        shared_pages: list[Pages] = []
        for segment, part in self._by_segment(slots):
            row_slots, full = slots[part], int(num_shared[part.start])
            rows.set_chain(row_slots, segment.chain)
            self.states.take(row_slots, segment.end_state, self._count_siblings)
            if above[part.start]:
                assert segment.table is not None
                first = int(rows.base[row_slots[0]]) - segment.base + full * size
                page = segment.table[min(first // size, len(segment.table) - 1)]
                source[part] = int(page) * size + first % size
                if full:
                    shared = pool.share(segment.table[:full], len(row_slots))
                    shared_pages += [shared] * len(row_slots)
        if shared_pages:
            rows.add_pages(slots, np.concatenate(shared_pages), num_shared)
        fresh = -(-(above + rows.count[slots] - 1) // size) - num_shared
        rows.add_pages(slots, pool.allocate(int(fresh.sum())), fresh)
        at = np.flatnonzero(num_copied)
        target = rows.table[slots[at], num_shared[at]].astype(np.int64)
        offset = np.arange(size)
        within = offset < num_copied[at, None]
        self._run.cache.copy_tokens(
            (source[at, None] + offset)[within], (target[:, None] * size + offset)[within]
        )
        # A prefill pass computes the keys of all generated tokens but the last; a decode step
        # computes that one.
        again = rows.count[slots] > 1
        self._move(slots[again], RESUMING)
        self.resuming.update((slot, int(rows.stop[slot])) for slot in slots[again].tolist())
        if not again.all():
            self.start_decoding(slots[~again])

    def start_decoding(self, slots: Ints) -> None:
        """Make rows live; their keys are computed."""
        self._move(slots, LIVE)
        self._stop_resuming(slots)
        rows, joined = self._run.rows, np.concatenate([self.live_slots, slots])
        # Sort by the shared segments first. Then the rows below any segment are consecutive.
        self.live_slots = joined[np.lexsort((rows.key[joined], *rows.chain[joined].T[::-1]))]

    def allocate_step_pages(self, order: Ints, counts: Ints) -> int:
        """Allocate the pages that a decode step needs, for rows with `counts` generated tokens.

        Returns:
            How many pages are missing. If any are, no page is allocated.
        """
        rows = self._run.rows
        offset = rows.stop[order] + counts - 1 - rows.base[order]
        need = order[offset // self._page_size >= rows.num_pages[order]]
        if len(need) > self._pool.num_free:
            return len(need) - self._pool.num_free
        if len(need):
            rows.add_pages(need, self._pool.allocate(len(need)))
        return 0

    def reserve_lookahead(self, order: Ints, counts: Ints, num_R: Ints) -> Ints:
        """Allocate pages for further tokens, unless that takes more than half of the free pages.

        Args:
            order: Slots of the rows, [rows].
            counts: Number of generated tokens of each row, [rows].
            num_R: Number of further tokens of each row, [rows].

        Returns:
            For how many further tokens each row has pages, at most `num_R`.
        """
        rows, size = self._run.rows, self._page_size
        used = rows.stop[order] + counts - rows.base[order]
        missing_R = np.maximum(-(-(used + num_R) // size) - rows.num_pages[order], 0)
        need = np.flatnonzero(missing_R)
        if len(need):
            total = int(missing_R.sum())
            if 2 * total > self._pool.num_free:
                room: Ints = np.minimum(num_R, rows.num_pages[order] * size - used)
                return room
            rows.add_pages(order[need], self._pool.allocate(total), missing_R[need])
        return num_R

    def preempt_last(self) -> bool:
        """Make the last active row ready and free its pages. Return False if only one is active."""
        if self.num_active <= 1:
            return False
        active = self.active()
        last = active[[np.argmax(self._run.rows.key[active])]]
        self._free_and_move(last, READY)
        self._enqueue(last)
        return True

    def preempt_all(self) -> None:
        """Make all active rows ready and free their pages."""
        active = self.active()
        self._free_and_move(active, READY)
        self._enqueue(active)

    def end(self, slots: Ints) -> None:
        """End rows whose samples have finished; their slots are released once these are reported.

        Their pages are freed at once.
        """
        self.page_demand.record_lengths(slots)
        self._free_and_move(slots, ENDED)

    def cancel(self, slots: Ints) -> None:
        """Drop rows of any phase, and release their slots."""
        self._free_and_move(slots, FREE)
        self._run.rows.release(slots)

    def release(self, slots: Ints) -> None:
        """Release the slots of rows that have ended."""
        self._move(slots, FREE)
        self._run.rows.release(slots)

    def clear(self) -> None:
        """Drop all rows except ended ones; the caller has freed their pages."""
        self.resuming.clear()
        self.states.clear()
        self.release(np.flatnonzero(~np.isin(self._run.rows.phase, [FREE, ENDED])))
        self._drop_moved()

    def _free_and_move(self, slots: Ints, phase: RowPhase) -> None:
        """Free the pages and states of rows, and move the rows to a phase without pages."""
        self._pool.free(self._run.rows.take_pages(slots))
        self.states.release(slots)
        self._move(slots, phase)
        self._stop_resuming(slots)
        self._drop_moved()

    def _stop_resuming(self, slots: Ints) -> None:
        if self.resuming:
            for slot in slots.tolist():
                self.resuming.pop(slot, None)

    def count_missing_slots(self, request: LiveRequest, segment_slots: int = 0) -> int:
        """Return how many recurrent state slots are missing to start a request.

        Args:
            request: The request, of which one row is counted if it has rows.
            segment_slots: Number of slots that its segments need. Default: 0.
        """
        return self.states.count_missing(segment_slots, has_row=bool(request.spec.rows))

    def check(self, starting: Ints, ended: Ints) -> None:
        """Assert that every row is in the queue of its phase, and in no other.

        Args:
            starting: Slots whose first tokens are being drawn.
            ended: Slots whose samples wait to be reported.
        """
        rows, phase = self._run.rows, self._run.rows.phase
        resuming = np.fromiter(self.resuming, dtype=np.int64)
        slots_of = {
            DRAWN: starting,
            READY: self.ready,
            RESUMING: resuming,
            LIVE: self.live_slots,
            ENDED: ended,
        }
        for row_phase, slots in slots_of.items():
            in_phase = np.flatnonzero(phase == row_phase)
            assert np.array_equal(np.sort(slots), in_phase), (
                f"a row is in no queue: {row_phase.name}"
            )
        assert np.array_equal(np.flatnonzero(phase != FREE), rows.used()), "a row has no slot"
        paged = np.flatnonzero((rows.num_pages > 0) & (phase != FREE))
        is_active = (phase[paged] == RESUMING) | (phase[paged] == LIVE)
        assert is_active.all(), "a row that is not active has pages"
