"""Splits a segment in two: the tokens that another prompt shares, and the rest below them."""

from __future__ import annotations

from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.store import SegmentStore
from treegen.prompts.plan.plan import segment_pages


def has_room_to_split(store: SegmentStore, segment: LiveSegment) -> bool:
    """Return whether each request below a segment still fits into the pool after a split.

    Each segment of a path may end in a page that is not full, which the next segment copies. So a
    split may need more pages.
    """
    size, most = store.cache.page_size, store.cache.pool.num_pages
    above = sum(
        segment_pages(s.base, s.start, s.stop, size) for s in segment.path() if s is not segment
    )
    below = [(segment, above + 1, sum(1 for _ in segment.path()))]  # for the two parts
    while below:
        part, pages, depth = below.pop()
        # A segment below a cascaded one starts its own table, at another offset in a page.
        pages += segment_pages(part.base, part.start, part.stop, size) + 1
        depth += 1
        if any(pages + request.row_pages(size) >= most for request in part.requests):
            return False
        if not store.states.fit(depth, part.requests):
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
