"""Completes the page tables of segments, and fills their first pages.

A table shares the full pages of a folded segment above, or the pages of a kept prefix. Tokens that
do not fill a page there are copied into the segment's own first page.
"""

from __future__ import annotations

import numpy as np

from treegen.engine.segments.prefix_matching import PrefixMatcher
from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.segment_states import SegmentStates
from treegen.ops.cache.pool import PagedCache, table_slots


class SegmentPageTables:
    """Completes the page tables of segments."""

    def __init__(
        self, cache: PagedCache, supply: PrefixMatcher, states: SegmentStates | None
    ) -> None:
        """Set up the page tables of a run.

        Args:
            cache: The paged KV cache.
            supply: Finds kept prefixes that have tokens of segments.
            states: Recurrent states of the segments; None for a model without recurrent layers.
        """
        self._cache, self._supply, self._states = cache, supply, states

    def place(self, segment: LiveSegment) -> int:
        """Complete a segment's page table; return how many tokens kept prefixes supplied."""
        page_size, pool = self._cache.page_size, self._cache.pool
        missing = segment.missing_pages(page_size)
        if segment.table is None:
            segment.computed = segment.start
        if self._states is not None:
            self._states.place(segment)
        if segment.table is not None:
            if missing:
                segment.table = np.concatenate([segment.table, pool.allocate(missing)])
            return 0
        shared = (segment.start - segment.base) // page_size
        above = segment.parent.table if segment.parent is not None else None
        head = above[:shared] if above is not None and shared else np.empty(0, dtype=np.int32)
        prefix, covered = self._supply.find_match(segment)
        kept = prefix.pages if prefix is not None else None
        whole = segment.base == 0 and covered == segment.stop
        whole = whole and kept is not None and np.array_equal(head, kept[:shared])
        if prefix is not None and kept is not None and whole:
            # The segment can share the pages of the prefix, as the segment above does.
            segment.table = pool.share(kept[: -(-segment.stop // page_size)])
            return self._supply.note_use(prefix, segment, covered)
        fresh = pool.allocate(missing, contiguous=True)
        segment.table = np.concatenate([pool.share(head), fresh])
        if prefix is None or kept is None:
            return 0
        first = segment.base + shared * page_size
        self._cache.copy_tokens(
            table_slots(kept, first, covered, page_size),
            table_slots(segment.table, first - segment.base, covered - segment.base, page_size),
        )
        return self._supply.note_use(prefix, segment, covered)

    def continue_parent(self, segment: LiveSegment) -> None:
        """Copy folded tokens of the parent that do not fill a page into a segment's own page."""
        if segment.continued or not segment.reads_on:
            return
        segment.continued = True
        parent, size = segment.parent, self._cache.page_size
        assert parent is not None and parent.table is not None and segment.table is not None
        start = segment.start - (segment.start - segment.base) % size
        self._cache.copy_tokens(
            table_slots(parent.table, start - parent.base, segment.start - parent.base, size),
            table_slots(segment.table, start - segment.base, segment.start - segment.base, size),
        )
