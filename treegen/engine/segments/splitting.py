"""A segment that becomes two: the tokens that another prompt shares, and the rest below them."""

from __future__ import annotations

from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.store import SegmentStore
from treegen.prompts.plan.plan import segment_pages


def has_room_to_split(store: SegmentStore, segment: LiveSegment) -> bool:
    """Whether each request below a segment still fits the pool once the segment is in two.

    Each segment of a path may end in a page that is not full, and the next one copies it. So
    a split may take more pages.
    """
    size, most = store.cache.page_size, store.cache.pool.num_pages
    above = sum(
        segment_pages(s.base, s.start, s.stop, size) for s in segment.path() if s is not segment
    )
    below = [(segment, above + 1, sum(1 for _ in segment.path()))]  # for the two parts
    while below:
        each, pages, depth = below.pop()
        # A segment below a kept one starts a table of its own, at another offset in a page.
        pages += segment_pages(each.base, each.start, each.stop, size) + 1
        depth += 1
        if any(pages + request.row_pages(size) >= most for request in each.requests):
            return False
        if store.states is not None and not store.states.fit(depth, each.requests):
            return False
        below += ((child, pages, depth) for child in each.children.values())
    return True


def split(store: SegmentStore, segment: LiveSegment, cut: int, *, rows: int) -> LiveSegment:
    """Make the tokens up to position `cut` a segment of their own above the rest.

    Returns the new segment, with one reference for the caller; `segment` keeps the rest. The
    segment must be untouched, for pages and rows refer to what is above them.
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
        each = below.pop()
        assert each.parent is not None
        each.base, each.above = each.parent.base_below, each.parent.chain
        below += each.children.values()
    return head
