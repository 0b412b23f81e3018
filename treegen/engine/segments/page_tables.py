"""Completes the page tables of segments, and fills their first pages.

A table shares the full pages of a folded segment above, or the pages of a cached prefix. Tokens
that do not fill a page there are copied into the segment's own first page.
"""

from __future__ import annotations

import numpy as np

from treegen.engine.segments.prefix_cache import CachedPrefix, PrefixCache
from treegen.engine.segments.segment import LiveSegment, SegmentStates
from treegen.ops.cache.pool import PagedCache, table_slots
from treegen.prompts.radix import common_prefix


class SegmentPageTables:
    """Completes the page tables of segments, whose first tokens cached prefixes may have."""

    def __init__(self, cache: PagedCache, prefix_cache: PrefixCache, states: SegmentStates) -> None:
        """Set up the page tables of a run.

        Args:
            cache: The paged KV cache.
            prefix_cache: The cached prefixes.
            states: Recurrent states of the segments.
        """
        self._cache, self._prefix_cache, self._states = cache, prefix_cache, states

    def match_roots(self, roots: list[LiveSegment]) -> None:
        """Record the longest matching prefix of each new segment, from these roots down."""
        for prefix in self._prefix_cache:
            level = list(roots)
            while level:
                segment = level.pop()
                shared = common_prefix(prefix.tokens[segment.start :], segment.tokens)
                if shared:
                    self._record_if_longer(prefix, segment, segment.start + shared)
                    if segment.start + shared == segment.stop:
                        level += segment.children.values()

    def match_one(self, segment: LiveSegment) -> None:
        """Record the longest matching prefix of one segment below other segments."""
        if prefixes := list(self._prefix_cache):
            tokens = segment.path_tokens()
            for prefix in prefixes:
                self._record_if_longer(prefix, segment, common_prefix(prefix.tokens, tokens))

    def allocate(self, segment: LiveSegment) -> int:
        """Complete a segment's page table; return how many tokens cached prefixes supplied."""
        page_size, pool = self._cache.page_size, self._cache.pool
        missing = segment.missing_pages(page_size)
        if segment.table is None:
            segment.computed = segment.start
        self._states.allocate(segment)
        if segment.table is not None:
            if missing:
                segment.table = np.concatenate([segment.table, pool.allocate(missing)])
            return 0
        shared = (segment.start - segment.base) // page_size
        above = segment.parent.table if segment.parent is not None else None
        head = above[:shared] if above is not None and shared else np.empty(0, dtype=np.int32)
        prefix, covered = self._find_match(segment)
        pages = prefix.pages if prefix is not None else None
        is_whole = segment.base == 0 and covered == segment.stop
        is_whole = is_whole and pages is not None and np.array_equal(head, pages[:shared])
        if prefix is not None and pages is not None and is_whole:
            # The segment can share the pages of the prefix, as the segment above does.
            segment.table = pool.share(pages[: -(-segment.stop // page_size)])
            return self._record_use(prefix, segment, covered)
        fresh = pool.allocate(missing, contiguous=True)
        segment.table = np.concatenate([pool.share(head), fresh])
        if prefix is None or pages is None:
            return 0
        first = segment.base + shared * page_size
        self._cache.copy_tokens(
            table_slots(pages, first, covered, page_size),
            table_slots(segment.table, first - segment.base, covered - segment.base, page_size),
        )
        return self._record_use(prefix, segment, covered)

    def continue_parent(self, segment: LiveSegment) -> None:
        """Copy folded tokens of the parent that do not fill a page into a segment's own page."""
        if segment.continued or not segment.has_folded_parent:
            return
        segment.continued = True
        parent, size = segment.parent, self._cache.page_size
        assert parent is not None and parent.table is not None and segment.table is not None
        start = segment.start - (segment.start - segment.base) % size
        self._cache.copy_tokens(
            table_slots(parent.table, start - parent.base, segment.start - parent.base, size),
            table_slots(segment.table, start - segment.base, segment.start - segment.base, size),
        )

    def _find_match(self, segment: LiveSegment) -> tuple[CachedPrefix | None, int]:
        """Return the cached prefix that supplies a segment's first tokens, and the last position.

        The prefix is used only if the segment above is computed. Otherwise the segment above would
        be computed although this one counts as computed already.
        """
        prefix, covered = segment.reuse or (None, segment.start)
        covered = min(covered, segment.first_logit)
        if prefix is not None:
            covered = self._states.find_state_position(prefix, covered)
        parent = segment.parent
        parent_pending = parent is not None and parent.computed < segment.start
        if prefix is None or prefix.pages is None or covered <= segment.start or parent_pending:
            return None, segment.start
        return prefix, covered

    def _record_use(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> int:
        """Record that a prefix supplied the tokens up to a position; return how many were new."""
        self._states.copy_from(prefix, segment, covered)
        new = covered - segment.was_computed
        segment.mark_computed(covered)
        segment.continued = True
        self._prefix_cache.touch(prefix)
        return max(new, 0)

    def _record_if_longer(self, prefix: CachedPrefix, segment: LiveSegment, shared: int) -> None:
        usable = self._states.find_state_position(prefix, shared)
        if usable > (segment.reuse or (prefix, segment.start))[1]:
            segment.reuse = prefix, usable
