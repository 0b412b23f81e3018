"""Samples on their way: ready (no pages), resuming (keys being recomputed) and live (decoded)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from treegen.cache.pool import Pages
from treegen.engine.layout import Ints
from treegen.engine.rows import RowTable
from treegen.engine.segment import LiveRequest, LiveSegment
from treegen.engine.store import SegmentStore


class LiveRows:
    """Which slots of a RowTable are ready, resuming or live, and the pages they hold.

    order: live slots, depth first. ready: slots that wait for pages, depth first.
    resuming: slot -> position up to which its keys are computed.
    """

    def __init__(
        self, rows: RowTable, store: SegmentStore, requests: dict[int, LiveRequest]
    ) -> None:
        """No rows yet. requests: those that rows belong to, by index."""
        self.rows, self.store, self.requests = rows, store, requests
        self._pool, self._page_size = store.cache.pool, store.cache.page_size
        self.order: Ints = np.empty(0, dtype=np.int64)
        self.resuming: dict[int, int] = {}
        self.ready: Ints = np.empty(0, dtype=np.int64)
        self._ended_rows = self._ended_tokens = 0

    @property
    def num_active(self) -> int:
        """Rows that hold pages."""
        return len(self.order) + len(self.resuming)

    def active(self) -> Ints:
        """Slots that hold pages."""
        return np.concatenate([self.order, np.fromiter(self.resuming, dtype=np.int64)])

    def started(self) -> Ints:
        """Slots that hold pages or are ready to."""
        return np.concatenate([self.active(), self.ready])

    def tables(self) -> Iterator[Pages]:
        """Page tables of all rows, for the pool's check."""
        return (self.rows.table[s, : self.rows.num_pages[s]] for s in self.active())

    def push(self, slots: Sequence[int]) -> None:
        """Make rows ready."""
        ready = np.concatenate([self.ready, np.array(slots, dtype=np.int64)])
        self.ready = ready[self.rows.key[ready].argsort()]

    def _by_segment(self, slots: Ints) -> Iterator[tuple[LiveSegment, slice]]:
        """The segments that slots start below, and runs of the slots below each."""
        requests = self.rows.request[slots]
        starts = np.flatnonzero(np.diff(requests, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            yield self.requests[int(requests[start])].segment, slice(start, stop)

    def activate(self, max_rows: int) -> None:
        """Give ready rows their pages, depth first, while the pool is expected to last.

        For rows that grow, caches that are idle are evicted.
        """
        while len(self.ready) and self.num_active < max_rows:
            slots = self.ready[: max_rows - self.num_active]
            # What is above may have become a part of its own since the rows were made ready.
            for segment, run in self._by_segment(slots):
                self.rows.base[slots[run]] = segment.base_below
            needed = self.expected_growth() + self._pages_to_come(slots).cumsum()
            num = int(needed.searchsorted(self._pool.num_free, side="right"))
            if num:
                self._start(slots[:num])
            else:
                request = self.requests[int(self.rows.request[slots[0]])]
                # What is idle leaves before a row waits for it.
                if not request.grows or not self.store.evict_idle():
                    return

    def _start(self, slots: Ints) -> None:
        """Take the pages that the first of the ready rows need now."""
        rows, pool, size = self.rows, self._pool, self._page_size
        self.ready = self.ready[len(slots) :]
        # Full pages of what is above that rows read as their own are shared, a last one is copied.
        above = rows.stop[slots] - rows.base[slots]
        num_shared, num_copied = above // size, above % size
        source = np.zeros(len(slots), dtype=np.int64)
        for segment, run in self._by_segment(slots):
            mine, full = slots[run], int(num_shared[run.start])
            rows.set_chain(mine, segment.chain)
            if above[run.start]:
                assert segment.table is not None
                source[run] = segment.table[-1]
                for _ in mine:
                    pool.share(segment.table[:full])
                rows.add_pages(mine, np.tile(segment.table[:full], len(mine)), full)
        fresh = -(-(above + rows.count[slots] - 1) // size) - num_shared
        rows.add_pages(slots, pool.allocate(int(fresh.sum())), fresh)
        at = np.flatnonzero(num_copied)
        target = rows.table[slots[at], num_shared[at]].astype(np.int64)
        offset = np.arange(size)
        within = offset < num_copied[at, None]
        self.store.cache.copy_tokens(
            (source[at, None] * size + offset)[within], (target[:, None] * size + offset)[within]
        )
        # Keys of all but the last token are computed again; decoding computes that one.
        again = rows.count[slots] > 1
        self.resuming.update((slot, int(rows.stop[slot])) for slot in slots[again].tolist())
        if not again.all():
            self.join(slots[~again])

    def join(self, slots: Ints) -> None:
        """Rows whose keys are in place go live."""
        joined = np.concatenate([self.order, slots])
        # By what rows share first, so that the rows below any segment are consecutive.
        self.order = joined[np.lexsort((self.rows.key[joined], *self.rows.chain[joined].T[::-1]))]

    def pages_short(self, order: Ints, counts: Ints) -> int:
        """Take the pages that a step of some rows needs, each with so many tokens drawn.

        Returns how many are lacking, if any; then none is taken.
        """
        rows = self.rows
        offset = rows.stop[order] + counts - 1 - rows.base[order]
        need = order[offset // self._page_size >= rows.num_pages[order]]
        if len(need) > self._pool.num_free:
            return len(need) - self._pool.num_free
        if len(need):
            rows.add_pages(need, self._pool.allocate(len(need)))
        return 0

    def preempt_last(self) -> bool:
        """Take the pages of the last active row; it becomes ready again. False if only one."""
        if self.num_active <= 1:
            return False
        active = self.active()
        slot = int(active[np.argmax(self.rows.key[active])])
        self._leave(np.array([slot]))
        self.push([slot])
        return True

    def remove(self, slots: Ints, *, ended: bool) -> None:
        """Rows leave for good, from wherever they are; frees their pages.

        ended: by themselves, so that their lengths say how long others may become. Their slots are
        then the caller's to release, once what they have generated is reported.
        """
        if ended:
            self._ended_rows += len(slots)
            self._ended_tokens += int(self.rows.count[slots].sum())
        self._leave(slots)
        if len(self.ready):
            self.ready = self.ready[~np.isin(self.ready, slots)]
        if not ended:
            self.rows.release(slots)

    def clear(self) -> None:
        """Forget all rows; their pages have been freed."""
        self.order = self.order[:0]
        self.resuming.clear()
        self.ready = self.ready[:0]

    def park(self, request: int) -> list[int]:
        """Take a request's ready rows out of the queue; returns their slots."""
        mine = self.rows.request[self.ready] == request
        slots: list[int] = self.ready[mine].tolist()
        self.ready = self.ready[~mine]
        return slots

    def _leave(self, slots: Ints) -> None:
        self._pool.free(self.rows.take_pages(slots))
        if self.resuming:
            for slot in slots.tolist():
                self.resuming.pop(slot, None)
        staying = ~np.isin(self.order, slots)
        if not staying.all():
            self.order = self.order[staying]

    def expected_growth(self) -> int:
        """Pages that active rows are expected to take yet."""
        return int(self._pages_to_come(self.active()).sum())

    def _pages_to_come(self, slots: Ints) -> Ints:
        """Pages that rows are expected to take yet; how long they get is learned from others."""
        rows, page_size = self.rows, self._page_size
        length = rows.limit[slots]
        if self._ended_rows:
            mean = self._ended_tokens / self._ended_rows
            guess = np.maximum(rows.count[slots], int(1.25 * mean)) + page_size
            length = np.minimum(length, guess)
        base = rows.base[slots]
        shared = (rows.stop[slots] - base) // page_size
        have = np.maximum(rows.num_pages[slots], shared)
        to_come: Ints = -(-(rows.stop[slots] + length - 1 - base) // page_size) - have
        return np.maximum(to_come, 0, dtype=np.int64)
