"""Where the recurrent states of segments are: after the last token, and maybe one token earlier.

What goes on below a segment reads the state after its last token. Whoever draws from a segment once
more needs the logits of its last token again, and so the state before that token. In a search both
are kept; in other runs only the first is. There a segment that is drawn from again, while others go
on from its end, is computed anew beside the state that these read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.ops.cache.state_cache import NO_STATE, StateCache


class StateSpan(NamedTuple):
    """Slots of the states around consecutive tokens of a segment or row.

    reads: slot of the state before the first token.
    leaves: slot for the state before the last token; NO_STATE if it is not wanted or there already.
    writes: slot for the state after the last token.
    """

    reads: int
    leaves: int
    writes: int


class SegmentStates:
    """The slots that segments own: `end_state` and `last_state` of LiveSegment.

    The state at the position up to which a segment is computed is in `end_state` if that is its
    end. Until then it is in `last_state` if that is kept, and else in `end_state` too.
    """

    def __init__(self, cache: StateCache, *, rewinds: bool) -> None:
        """rewinds: whether the last token of a segment may be computed once more."""
        self.cache = cache
        self._rewinds = rewinds

    def _keeps_last(self, segment: LiveSegment) -> bool:
        # Before the only token of a segment the state is that of the segment above.
        return len(segment.tokens) > 1 and (self._rewinds or segment.last_state != NO_STATE)

    @staticmethod
    def _is_read(segment: LiveSegment, computed: int) -> bool:
        """Whether others go on from the end of a segment that is computed anew from a position."""
        is_whole = segment.computed == segment.stop
        return is_whole and computed < segment.stop - 1 and bool(segment.openers)

    def fit(self, depth: int, requests: Sequence[LiveRequest]) -> bool:
        """Whether there are slots for any of some requests alone, below so many segments."""
        has_rows = any(request.spec.rows for request in requests)
        return not requests or 2 * (depth + has_rows) <= self.cache.num_slots

    def find_rewind_position(self, segment: LiveSegment) -> int:
        """The position from which a segment is computed again for the logits of its last token."""
        last = segment.stop - 1
        return last if segment.last_state or last == segment.start else segment.start

    def leave_end(self, segment: LiveSegment, computed: int) -> None:
        """Take a slot to compute a segment anew in, if others read the state at its end meanwhile.

        Args:
            computed: The position from which it is computed.
        """
        if self._is_read(segment, computed):
            segment.last_state = self.cache.allocate_one()

    def missing(self, segment: LiveSegment, computed: int) -> int:
        """Slots to take for a segment that is, or is to be, computed up to a position."""
        if computed == segment.stop:
            return 0
        keeps_last = self._keeps_last(segment) or self._is_read(segment, computed)
        return (segment.end_state == NO_STATE) + (keeps_last and segment.last_state == NO_STATE)

    def place(self, segment: LiveSegment) -> None:
        """Take the slots that a segment lacks."""
        if segment.computed < segment.stop:
            segment.end_state = segment.end_state or self.cache.allocate_one()
            if self._keeps_last(segment):
                segment.last_state = segment.last_state or self.cache.allocate_one()

    def free(self, segment: LiveSegment) -> None:
        """Give up the slots of a segment."""
        self.cache.free([segment.end_state, segment.last_state])
        segment.end_state = segment.last_state = NO_STATE

    def span(self, segment: LiveSegment, start: int, stop: int) -> StateSpan:
        """What computing the tokens of a segment between two positions reads and writes."""
        running = segment.last_state if self._keeps_last(segment) else segment.end_state
        reads = running
        if start == segment.start:
            reads = segment.parent.end_state if segment.parent is not None else NO_STATE
            assert reads != NO_STATE or segment.parent is None, "a parent's state is not in place"
        if stop < segment.stop:
            return StateSpan(reads, NO_STATE, running)
        keeps_last = self._rewinds and running != segment.end_state
        leaves = running if keeps_last and start < stop - 1 else NO_STATE
        return StateSpan(reads, leaves, segment.end_state)

    def on_whole(self, segment: LiveSegment) -> None:
        """Give up the slot that a segment was computed anew in."""
        if not self._rewinds:
            self.on_undone(segment)

    def on_undone(self, segment: LiveSegment) -> None:
        """Forget how far a segment was computed anew; the state at its end is in place."""
        self.cache.free([segment.last_state])
        segment.last_state = NO_STATE

    def on_idle(self, segment: LiveSegment) -> None:
        """Have a segment that is not whole need one slot alone, for nobody reads its end now."""
        if not self._rewinds and segment.last_state != NO_STATE:
            self.cache.free([segment.end_state])
            segment.end_state, segment.last_state = segment.last_state, NO_STATE

    def adopt(self, segment: LiveSegment, now: int, before: int) -> None:
        """Take over slots of a row: with the state where a segment is computed, and one earlier."""
        if segment.computed < segment.stop and self._keeps_last(segment):
            segment.last_state, spare = now, before
        elif segment.computed < segment.stop:
            segment.end_state, spare = now, before
        else:
            keeps_last = self._keeps_last(segment)
            segment.end_state = now
            segment.last_state, spare = (before, NO_STATE) if keeps_last else (NO_STATE, before)
        self.cache.free([spare])

    # Kept prefixes

    @staticmethod
    def find_state_position(prefix: CachedPrefix, most: int) -> int:
        """The furthest position up to `most` at which a prefix has a state; 0 if there is none."""
        whole = len(prefix.tokens)
        at = {whole: prefix.end_state, whole - 1: prefix.last_state}
        return max((p for p, slot in at.items() if slot != NO_STATE and p <= most), default=0)

    def copy_from(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> None:
        """Have the state that a prefix has at a position, which is within the segment."""
        is_whole = covered == len(prefix.tokens)
        source = prefix.end_state if is_whole else prefix.last_state
        keeps_last = self._keeps_last(segment)
        if covered < segment.stop and keeps_last:
            self.cache.copy(source, segment.last_state)
            return
        self.cache.copy(source, segment.end_state)
        if covered == segment.stop and keeps_last:
            if is_whole and prefix.last_state:
                self.cache.copy(prefix.last_state, segment.last_state)
            else:
                self.cache.free([segment.last_state])
                segment.last_state = NO_STATE
