"""The segments of a plan while they are in memory: page tables, references, what is computed.

A segment is opened when the first request below it starts, computed by prefill, and freed when
the last request below it is finished. Under memory pressure a segment that no open request needs
may be evicted; it is computed again when it is opened again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treegen.cache import PagedCache, Pages, table_slots
from treegen.kept import KeptPrefix, KeptPrefixes
from treegen.layout import Ints
from treegen.plan import Plan
from treegen.radix import common_prefix


class SegmentStore:
    """Page tables of one plan's segments.

    computed[s]: position up to which keys and values of segment s are in place.
    chains: [segments, depth] kept segments from the root down to and including s, padded with -1.
    """

    def __init__(self, plan: Plan, cache: PagedCache, kept: KeptPrefixes) -> None:
        """Nothing is open yet."""
        self.plan = plan
        self.cache = cache
        self._kept = kept
        num = len(plan.segments)
        self.tables: list[Pages | None] = [None] * num
        self.computed = np.array([segment.start for segment in plan.segments], dtype=np.int64)
        self.was_computed = self.computed.copy()
        self.first_logit, self.scored = _logit_positions(plan)
        self.children: list[list[int]] = [[] for _ in range(num)]
        self._users = np.zeros(num, dtype=np.int64)  # unfinished requests at or below
        self._openers = np.zeros(num, dtype=np.int64)  # open requests at or below
        self._copied = np.zeros(num, dtype=bool)
        self._reuse: dict[int, tuple[KeptPrefix, int]] = {}
        for segment in plan.segments:
            if segment.parent >= 0:
                self.children[segment.parent].append(segment.index)
        for request in range(len(plan.requests)):
            for segment in plan.path(request):
                self._users[segment.index] += 1
        self.chains = _chains(plan)
        for prefix in kept:
            self._match(prefix)

    def _match(self, prefix: KeptPrefix) -> None:
        """Note how much of which segments a kept prefix covers."""
        level = [segment.index for segment in self.plan.segments if segment.parent < 0]
        while level:
            index = level.pop()
            segment = self.plan.segments[index]
            shared = common_prefix(prefix.tokens[segment.start :], segment.tokens)
            if shared == 0:
                continue
            if shared > self._reuse.get(index, (prefix, segment.start))[1] - segment.start:
                self._reuse[index] = prefix, segment.start + shared
            if segment.start + shared == segment.stop:
                level = list(self.children[index])

    def keys_of(self, index: int) -> tuple[Pages, int, int]:
        """Page table, number of keys and first position of a kept segment."""
        table, segment = self.tables[index], self.plan.segments[index]
        assert table is not None
        return table, segment.stop - segment.base, segment.base

    def pages_to_open(self, request: int) -> int:
        """Pages that opening a request takes at most."""
        return sum(
            self.plan.table_pages(segment, self.cache.page_size)
            for segment in self.plan.path(request)
            if self.tables[segment.index] is None
        )

    def open(self, request: int) -> tuple[list[int], int]:
        """Give every segment on a request's path its pages.

        Returns the segments that are still to be computed, root first, and how many tokens were
        found in kept prefixes.
        """
        reused = 0
        to_compute = []
        for segment in reversed(list(self.plan.path(request))):
            index = segment.index
            self._openers[index] += 1
            if self.tables[index] is None:
                reused += self._allocate(index)
            if self.computed[index] < segment.stop:
                to_compute.append(index)
        return to_compute, reused

    def _allocate(self, index: int) -> int:
        """Build a segment's page table; returns the tokens that kept prefixes supplied."""
        segment, page_size = self.plan.segments[index], self.cache.page_size
        pool = self.cache.pool
        self.computed[index] = segment.start
        shared = (segment.start - segment.base) // page_size
        above = self.tables[segment.parent] if segment.parent >= 0 else None
        head = above[:shared] if above is not None and shared else np.empty(0, dtype=np.int32)
        prefix, covered = self._covering(index)
        kept = prefix.pages if prefix is not None else None
        whole = segment.base == 0 and covered == segment.stop
        if kept is not None and whole and np.array_equal(head, kept[:shared]):
            # The very pages of the prefix will do; the segment above has the same ones.
            self.tables[index] = pool.share(kept[: -(-segment.stop // page_size)])
            return self._finish_reuse(index, prefix, covered)
        fresh = pool.allocate(self.plan.table_pages(segment, page_size), contiguous=True)
        table = np.concatenate([pool.share(head), fresh])
        self.tables[index] = table
        self._copied[index] = segment.start - segment.base == shared * page_size
        if kept is None:
            return 0
        first = segment.base + shared * page_size
        self.cache.copy_tokens(
            table_slots(kept, first, covered, page_size),
            table_slots(table, first - segment.base, covered - segment.base, page_size),
        )
        return self._finish_reuse(index, prefix, covered)

    def _covering(self, index: int) -> tuple[KeptPrefix | None, int]:
        """The kept prefix that supplies a segment's first tokens, and up to which position.

        Only below ancestors that are in place as a whole: otherwise these would be computed while
        their descendants seem to be.
        """
        segment = self.plan.segments[index]
        prefix, covered = self._reuse.get(index, (None, segment.start))
        covered = min(covered, int(self.first_logit[index]))
        waits = segment.parent >= 0 and self.computed[segment.parent] < segment.start
        if prefix is None or prefix.pages is None or covered <= segment.start or waits:
            return None, segment.start
        return prefix, covered

    def _finish_reuse(self, index: int, prefix: KeptPrefix | None, covered: int) -> int:
        """Note that a prefix supplied tokens; returns how many it had not supplied before."""
        assert prefix is not None
        new = covered - int(self.was_computed[index])
        self.mark_computed(index, covered)
        self._copied[index] = True
        self._kept.touch(prefix)
        return max(new, 0)

    def is_ready(self, index: int, reached: dict[int, int]) -> bool:
        """Whether a segment can be computed in a pass that computes others up to `reached`.

        A kept parent may be computed in the same pass, for a layer writes all keys before it
        attends. A folded parent must be there already: its last page is copied first. What is
        above the parent is in place if the parent is.
        """
        segment = self.plan.segments[index]
        if segment.parent < 0:
            return True
        parent = self.plan.segments[segment.parent]
        if parent.kept:
            position = reached.get(parent.index, int(self.computed[parent.index]))
            return position == parent.stop
        return bool(self.computed[parent.index] == parent.stop)

    def mark_computed(self, index: int, stop: int) -> None:
        """Note that keys and values of a segment are in place up to a position."""
        self.computed[index] = stop
        self.was_computed[index] = max(self.was_computed[index], stop)

    def chain_above(self, index: int) -> Ints:
        """Kept segments above a segment, padded with -1 like a row of `chains`."""
        parent = self.plan.segments[index].parent
        return self.chains[parent] if parent >= 0 else np.full_like(self.chains[index], -1)

    def continue_parent(self, index: int) -> None:
        """Copy the partly filled last page of a folded parent into a segment's first page."""
        if self._copied[index]:
            return
        self._copied[index] = True
        segment = self.plan.segments[index]
        table, above = self.tables[index], self.tables[segment.parent]
        assert table is not None and above is not None
        self._copy_tail(above, table, segment.start - segment.base)

    def fork(self, index: int) -> tuple[Pages, int]:
        """Page table and base of a new row that continues a segment; takes references."""
        segment, pool = self.plan.segments[index], self.cache.pool
        table = self.tables[index]
        assert table is not None
        if segment.kept:
            return np.empty(0, dtype=np.int32), segment.stop
        length = segment.stop - segment.base
        full = length // self.cache.page_size
        tail = pool.allocate(int(length % self.cache.page_size > 0))
        pages = np.concatenate([pool.share(table[:full]), tail])
        self._copy_tail(table, pages, length)
        return pages, segment.base

    def _copy_tail(self, source: Pages, target: Pages, length: int) -> None:
        start = length - length % self.cache.page_size
        self.cache.copy_tokens(
            table_slots(source, start, length, self.cache.page_size),
            table_slots(target, start, length, self.cache.page_size),
        )

    def close(self, request: int, *, opened: bool, finished: bool) -> None:
        """A request leaves; segments that no unfinished request needs are freed."""
        for segment in self.plan.path(request):
            self._openers[segment.index] -= opened
            self._users[segment.index] -= finished
            if self._users[segment.index] == 0:
                self._free(segment.index)

    def is_wanted(self, index: int) -> bool:
        """Whether an open request needs a segment."""
        return bool(self._openers[index] > 0)

    def evict_idle(self) -> bool:
        """Free the last segment that no open request needs; False if there is none."""
        for index in range(len(self.tables) - 1, -1, -1):
            if self.tables[index] is not None and self._openers[index] == 0:
                self._free(index)
                return True
        return False

    def _free(self, index: int) -> None:
        table = self.tables[index]
        if table is not None:
            self.cache.pool.free(table)
            self.tables[index] = None

    def clear(self) -> None:
        """Forget all page tables; their pages have been freed."""
        self.tables = [None] * len(self.tables)

    def owned(self) -> Iterator[Pages]:
        """All page tables, for the pool's check."""
        return (table for table in self.tables if table is not None)


def _chains(plan: Plan) -> Ints:
    chains: list[tuple[int, ...]] = []
    for segment in plan.segments:
        above = chains[segment.parent] if segment.parent >= 0 else ()
        chains.append((*above, segment.index) if segment.kept else above)
    width = max(map(len, chains), default=0)
    padded = np.full((len(chains), width), -1, dtype=np.int64)
    for index, chain in enumerate(chains):
        padded[index, : len(chain)] = chain
    return padded


def _logit_positions(plan: Plan) -> tuple[Ints, Ints]:
    """Per segment: first position whose logits are wanted at all, and for scoring.

    Positions at or past the segment's end mean none.
    """
    num = len(plan.segments)
    scored = np.full(num, np.iinfo(np.int64).max)
    first = scored.copy()
    for segment in reversed(plan.segments):
        index = segment.index
        for request in (plan.requests[i] for i in segment.requests):
            if request.rows:
                first[index] = segment.stop - 1
            if request.score_from is not None:
                scored[index] = min(scored[index], request.score_from - 1)
        first[index] = min(first[index], scored[index])
        if segment.parent >= 0:
            scored[segment.parent] = min(scored[segment.parent], scored[index])
    return first, scored
