"""Samples on their way: ready (no pages), resuming (keys being recomputed) and live (decoded)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from treegen.cache import Pages
from treegen.layout import Ints
from treegen.live_tree import LiveRequest
from treegen.rows import RowTable
from treegen.segments import SegmentStore


class LiveRows:
    """Which slots of a RowTable are ready, resuming or live, and the pages they hold.

    order: live slots, depth first. version: changes whenever `order` does.
    resuming: slot -> position up to which its keys are computed.
    """

    def __init__(
        self, rows: RowTable, store: SegmentStore, requests: dict[int, LiveRequest]
    ) -> None:
        """No rows yet. requests: those that rows belong to, by index."""
        self.rows, self.store, self.requests = rows, store, requests
        self._pool, self._page_size = store.cache.pool, store.cache.page_size
        self.order: Ints = np.empty(0, dtype=np.int64)
        self.version = 0
        self.resuming: dict[int, int] = {}
        self.ready: list[tuple[int, int]] = []  # heap of (key, slot)
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
        ready = np.array([slot for _, slot in self.ready], dtype=np.int64)
        return np.concatenate([self.active(), ready])

    def tables(self) -> Iterator[Pages]:
        """Page tables of all rows, for the pool's check."""
        return (self.rows.table[s, : self.rows.num_pages[s]] for s in self.active())

    def push(self, slot: int) -> None:
        """Make a row ready."""
        self.rows.base[slot] = self._request(slot).segment.base_below
        heapq.heappush(self.ready, (int(self.rows.key[slot]), slot))

    def _request(self, slot: int) -> LiveRequest:
        return self.requests[int(self.rows.request[slot])]

    def activate(self, max_rows: int) -> None:
        """Give ready rows their pages, depth first, while the pool is expected to last.

        For rows that grow, caches that are idle are evicted.
        """
        growth = -1
        started: list[int] = []
        while self.ready and self.num_active + len(started) < max_rows:
            if growth < 0:
                growth = self.expected_growth()
            slot = self.ready[0][1]
            request = self._request(slot)
            # The segment above may have become a part of its own since the row was made ready.
            self.rows.base[slot] = request.segment.base_below
            needed = int(self._pages_to_come(np.array([slot]))[0])
            while needed + growth > self._pool.num_free:
                # What is idle leaves before a row waits for it.
                if not request.grows or not self.store.evict_idle():
                    break
            if needed + growth > self._pool.num_free:
                break
            growth += needed - self._start(slot)
            if self.rows.count[slot] == 1:
                started.append(slot)
        if started:
            self.join(started)

    def _start(self, slot: int) -> int:
        """Take the pages that a ready row needs now; returns how many fresh ones."""
        heapq.heappop(self.ready)
        rows, free = self.rows, self._pool.num_free
        segment = self._request(slot).segment
        pages, base = self.store.fork(segment)
        rows.set_chain(slot, segment.chain)
        end = int(rows.stop[slot] + rows.count[slot]) - 1
        missing = max(-(-(end - base) // self._page_size) - len(pages), 0)
        rows.base[slot] = base
        rows.set_table(slot, np.concatenate([pages, self._pool.allocate(missing)]))
        if rows.count[slot] > 1:
            # Keys of all but the last token are computed again; decoding computes that one.
            self.resuming[slot] = int(rows.stop[slot])
        return free - self._pool.num_free

    def join(self, slots: list[int]) -> None:
        """Rows whose keys are in place go live."""
        joined = np.concatenate([self.order, np.array(slots, dtype=np.int64)])
        # By what rows share first, so that the rows below any segment are consecutive.
        self.order = joined[np.lexsort((self.rows.key[joined], *self.rows.chain[joined].T[::-1]))]
        self.version += 1

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
        self.push(slot)
        return True

    def remove(self, slots: Ints, *, ended: bool) -> None:
        """Rows leave for good, from wherever they are; frees their pages and slots.

        ended: by themselves, so that their lengths say how long others may become.
        """
        if ended:
            self._ended_rows += len(slots)
            self._ended_tokens += int(self.rows.count[slots].sum())
        self._leave(slots)
        gone = set(slots.tolist())
        if any(slot in gone for _, slot in self.ready):
            self.ready = [item for item in self.ready if item[1] not in gone]
            heapq.heapify(self.ready)
        for slot in gone:
            self.rows.release(slot)

    def clear(self) -> None:
        """Forget all rows; their pages have been freed."""
        self.order = self.order[:0]
        self.resuming.clear()
        self.ready.clear()
        self.version += 1

    def park(self, request: int) -> list[int]:
        """Take a request's ready rows out of the queue; returns their slots."""
        mine = [slot for _, slot in self.ready if self.rows.request[slot] == request]
        self.ready = [item for item in self.ready if item[1] not in mine]
        heapq.heapify(self.ready)
        return mine

    def _leave(self, slots: Ints) -> None:
        self._pool.free(self.rows.take_pages(slots))
        for slot in slots.tolist():
            self.resuming.pop(slot, None)
        staying = ~np.isin(self.order, slots)
        if not staying.all():
            self.order = self.order[staying]
            self.version += 1

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
