"""Finds the segments that already hold the tokens of a given text.

A prompt is matched against earlier prompts, from the root down. If it diverges inside a segment,
the segment is split there, as long as nothing of it is computed. Otherwise the prompt continues
from a view of the segment's first pages. So what two prompts share is computed and stored once, in
whatever order they arrive.
"""

from __future__ import annotations

from collections import OrderedDict

from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.store import SegmentStore
from treegen.errors import CacheFullError, arg
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.plan.plan import Plan, Request, row_pages, segment_pages
from treegen.prompts.radix import Tokens, common_prefix

_MAX_RECENT = 256


class PromptIndex:
    """Segments of given text, by the segment above them and their first token."""

    def __init__(self, store: SegmentStore, *, rows: int, max_recent: int = _MAX_RECENT) -> None:
        """Create an empty index.

        Args:
            store: The segments in memory.
            rows: Rows to expect below a segment that prompts share.
            max_recent: Number of segments to keep although nothing else refers to them.
        """
        self._store, self._rows, self._max_recent = store, rows, max_recent
        self._page_size = store.cache.page_size
        self._below: dict[tuple[int, int], list[LiveSegment]] = {}
        # The most recently used segments are kept in memory by a reference of their own.
        self._recent: OrderedDict[int, LiveSegment] = OrderedDict()
        self._num_inserted = 0

    def add_plan(self, plan: Plan) -> list[LiveSegment]:
        """Return the last segment of each prompt of a plan, with one reference for the caller."""
        live = self._store.add_plan(plan)
        for segment in live:
            self._insert(segment)
        return [self._store.retain(live[int(index)]) for index in plan.segment_of]

    def find(self, tokens: Tokens) -> LiveSegment:
        """Return the segment that ends a prompt, with one reference for the caller."""
        parent: LiveSegment | None = None
        remaining = tokens
        while len(remaining):
            match, cut = self._find_longest_match(parent, remaining)
            if match is None:
                break
            if cut < match.stop:
                match = self._split_off(match, cut)
            elif match.index in self._recent:
                self._recent.move_to_end(match.index)
            remaining = remaining[len(match.tokens) :]
            parent = match
        if parent is not None and not len(remaining):
            return self._store.retain(parent)
        if parent is not None:
            self._store.promote(parent, self._rows)
        return self._store.retain(self._keep(self._store.add(parent, remaining)))

    def _find_longest_match(
        self, parent: LiveSegment | None, tokens: Tokens
    ) -> tuple[LiveSegment | None, int]:
        """Return the segment below `parent` that shares most tokens, and where sharing ends.

        Ties go to the shortest segment. The segment is None if no token can be shared.
        """
        key = self._key(parent, tokens)
        alive = [s for s in self._below.get(key, ()) if s.refs > 0]
        if not alive:
            self._below.pop(key, None)
            return None, 0
        self._below[key] = alive
        cuts = [self._cut(s, common_prefix(s.tokens, tokens)) for s in alive]
        best = max(range(len(alive)), key=lambda i: (cuts[i], -len(alive[i].tokens)))
        match, cut = alive[best], cuts[best]
        if cut < match.stop and not self._can_split(match):
            cut = self._align_to_page(match, cut)
        return (match, cut) if cut > match.start else (None, 0)

    def _cut(self, segment: LiveSegment, shared: int) -> int:
        """Return where a segment can be cut if its first `shared` tokens are shared."""
        cut = segment.start + shared
        if cut == segment.stop or segment.is_untouched:
            return cut
        return self._align_to_page(segment, cut)

    def _align_to_page(self, segment: LiveSegment, cut: int) -> int:
        """Return the end of the last full page up to position `cut` that is not inside a block."""
        blocks = self._store.blocks
        cut -= (cut - segment.base) % self._page_size
        if blocks is not None and cut > segment.start:
            low, _ = blocks.around(segment.tokens, cut - segment.start)
            if segment.start + low < cut:
                return self._align_to_page(segment, segment.start + low)
        return cut

    def _can_split(self, segment: LiveSegment) -> bool:
        return segment.is_untouched and has_room_to_split(self._store, segment)

    def _split_off(self, segment: LiveSegment, cut: int) -> LiveSegment:
        """Return the part of a segment up to position `cut`, as a separate segment that is kept."""
        if not self._can_split(segment):
            return self._keep(self._store.view(segment, cut, rows=self._rows))
        self._below[self._key(segment.parent, segment.tokens)].remove(segment)
        part = self._keep(split(self._store, segment, cut, rows=self._rows))
        self._insert(segment)
        return part

    @staticmethod
    def _key(parent: LiveSegment | None, tokens: Tokens) -> tuple[int, int]:
        return parent.index if parent is not None else -1, int(tokens[0])

    def _insert(self, segment: LiveSegment) -> None:
        self._below.setdefault(self._key(segment.parent, segment.tokens), []).append(segment)
        self._num_inserted += 1
        if self._num_inserted > 2 * len(self._store.segments) + self._max_recent:
            below = {key: [s for s in group if s.refs > 0] for key, group in self._below.items()}
            self._below = {key: group for key, group in below.items() if group}
            self._num_inserted = sum(map(len, self._below.values()))

    def _keep(self, segment: LiveSegment) -> LiveSegment:
        """Keep a new segment by the caller's reference until many other segments have been used."""
        self._insert(segment)
        self._recent[segment.index] = segment
        while len(self._recent) > self._max_recent:
            _, oldest = self._recent.popitem(last=False)
            self._store.release(oldest)
        return segment


def check_fits(name: str, segment: LiveSegment, spec: Request, cache: PagedCache) -> None:
    """Check that the cache has room for a request below a segment when nothing else is in it.

    Args:
        name: Names the request in error messages.
        segment: The segment that the request continues.
        spec: The request.
        cache: The cache.

    Raises:
        CacheFullError: The cache is too small.
    """
    size = cache.page_size
    needed = sum(segment_pages(s.base, s.start, s.stop, size) for s in segment.path())
    if spec.rows:
        needed += row_pages(segment.base_below, segment.stop, spec.max_tokens, size)
    if needed > cache.pool.num_pages:
        raise CacheFullError(
            f"{name} ({segment.stop:,} tokens, {arg('max_tokens')} {spec.max_tokens:,}) needs "
            f"{needed * size:,} cache tokens, but the cache holds only "
            f"{cache.pool.num_pages * size:,}; increase {arg('memory=')}, or lower "
            f"{arg('max_tokens')}"
        )
    if cache.states is None:
        return
    # Each segment needs the states before and after its last token, and so does a row.
    states = 2 * (sum(1 for _ in segment.path()) + bool(spec.rows))
    if states > cache.states.num_slots:
        raise CacheFullError(
            f"{name} needs {states:,} recurrent states, but the cache holds only "
            f"{cache.states.num_slots:,}; increase {arg('memory=')}, or use a tree with "
            "fewer levels"
        )


def has_room_to_split(store: SegmentStore, segment: LiveSegment) -> bool:
    """Return whether each request below a segment still fits into the pool after a split.

    Each segment of a path may end in a page that is not full, which the next segment copies. So a
    split may need more pages.
    """
    size, num_pages = store.cache.page_size, store.cache.pool.num_pages
    above = sum(
        segment_pages(s.base, s.start, s.stop, size) for s in segment.path() if s is not segment
    )
    below = [(segment, above + 1, sum(1 for _ in segment.path()))]  # for the two parts
    while below:
        part, pages, depth = below.pop()
        # A segment below a cascaded one starts its own table, at another offset in a page.
        pages += segment_pages(part.base, part.start, part.stop, size) + 1
        depth += 1
        if any(pages + request.row_pages(size) >= num_pages for request in part.requests):
            return False
        if not store.states.fits(depth, part.requests):
            return False
        below += ((child, pages, depth) for child in part.children.values())
    return True


def split(store: SegmentStore, segment: LiveSegment, cut: int, *, rows: int) -> LiveSegment:
    """Move the first tokens of a segment into a new segment above it.

    The segment must be untouched, because pages and rows refer to the segments above them.

    Args:
        store: The segments of the run.
        segment: The segment, which keeps the remaining tokens.
        cut: Position after the last token of the new segment.
        rows: Expected number of rows below the new segment, for the choice of its level.

    Returns:
        The new segment, with one reference for the caller.
    """
    assert segment.is_untouched and segment.start < cut < segment.stop
    parent, count = segment.parent, cut - segment.start
    head = store.retain(store.new(parent, segment.tokens[:count]))
    if parent is not None:
        del parent.children[segment.index]
        store.release(parent)
    store.retain(head).children[segment.index] = segment
    head.top = segment.top
    for name in ("first_logit", "scored"):
        if getattr(segment, name) < cut:
            setattr(head, name, getattr(segment, name))
    if segment.reuse is not None:
        prefix, covered = segment.reuse
        head.reuse = prefix, min(covered, cut)
        segment.reuse = segment.reuse if covered > cut else None
    segment.parent, segment.start, segment.tokens = head, cut, segment.tokens[count:]
    segment.shift = store.shift_after(head)
    segment.computed = segment.was_computed = cut
    store.promote(head, rows)
    below = [segment]
    while below:
        part = below.pop()
        assert part.parent is not None
        part.base, part.above = part.parent.base_below, part.parent.chain
        below += part.children.values()
    return head
