"""Recurrent states of segments: after the last token, and in searches also one token earlier.

Rows and segments below a segment read the state after its last token. To draw from a segment again,
the logits of its last token are needed, and so the state before that token. Searches keep both
states; other runs keep only the first. Then a segment that is drawn from again is computed again in
another slot, while other requests still read the state at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.engine.segments.segment_states import SegmentStates, StateSpan
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache


class RecurrentSegmentStates(SegmentStates):
    """The slots that segments own: `end_state` and `last_state` of LiveSegment.

    The state of a complete segment is in `end_state`. While a segment is only partly computed, its
    running state is in `last_state` if that is kept, and otherwise in `end_state`.
    """

    exist = True

    def __init__(self, cache: StateCache, *, rewinds: bool) -> None:
        """Set up a run; `rewinds` tells whether last tokens of segments may be computed again."""
        self.cache = cache
        self._rewinds = rewinds

    def _keeps_last(self, segment: LiveSegment) -> bool:
        # Before the only token of a segment the state is that of the segment above.
        return len(segment.tokens) > 1 and (self._rewinds or segment.last_state != NO_STATE)

    @staticmethod
    def _is_read(segment: LiveSegment, computed: int) -> bool:
        """Return whether requests read the end of a segment that is computed again."""
        is_whole = segment.computed == segment.stop
        return is_whole and computed < segment.stop - 1 and bool(segment.openers)

    def fit(self, depth: int, requests: Sequence[LiveRequest]) -> bool:
        """Return whether each request alone has enough slots, at the end of `depth` segments."""
        has_rows = any(request.spec.rows for request in requests)
        return not requests or 2 * (depth + has_rows) <= self.cache.num_slots

    def find_rewind_position(self, segment: LiveSegment) -> int:
        """Return from where a segment is computed again for the logits of its last token."""
        last = segment.stop - 1
        return last if segment.last_state or last == segment.start else segment.start

    def find_source(self, segment: LiveSegment, computed: int) -> LiveSegment | None:
        """Return the segment above if a segment continues from its end, being computed so far."""
        return segment.parent if computed == segment.start else None

    def leave_end(self, segment: LiveSegment, computed: int) -> None:
        """Allocate a slot to compute a segment again, if requests still read the state at its end.

        Args:
            segment: The segment.
            computed: The position from which it is computed.
        """
        if self._is_read(segment, computed):
            segment.last_state = self.cache.allocate_one()

    def missing(self, segment: LiveSegment, computed: int) -> int:
        """Return how many slots a segment that counts as computed up to a position still needs."""
        if computed == segment.stop:
            return 0
        keeps_last = self._keeps_last(segment) or self._is_read(segment, computed)
        return (segment.end_state == NO_STATE) + (keeps_last and segment.last_state == NO_STATE)

    def place(self, segment: LiveSegment) -> None:
        """Allocate the missing slots of a segment."""
        if segment.computed < segment.stop:
            segment.end_state = segment.end_state or self.cache.allocate_one()
            if self._keeps_last(segment):
                segment.last_state = segment.last_state or self.cache.allocate_one()

    def free(self, segment: LiveSegment) -> None:
        """Free the slots of a segment."""
        self.cache.free([segment.end_state, segment.last_state])
        segment.end_state = segment.last_state = NO_STATE

    def span(self, segment: LiveSegment, start: int, stop: int) -> StateSpan:
        """Return the state slots for computing a part of a segment.

        Args:
            segment: The segment.
            start: Position of the first token.
            stop: Position after the last token.
        """
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
        """Free the slot in which a now complete segment was computed again."""
        if not self._rewinds:
            self.on_undone(segment)

    def on_undone(self, segment: LiveSegment) -> None:
        """Drop the running state of a segment that was computed again; its end state is valid."""
        self.cache.free([segment.last_state])
        segment.last_state = NO_STATE

    def on_idle(self, segment: LiveSegment) -> None:
        """Free the end state of an incomplete segment, and store its running state there.

        Nothing reads the end state now.
        """
        if not self._rewinds and segment.last_state != NO_STATE:
            self.cache.free([segment.end_state])
            segment.end_state, segment.last_state = segment.last_state, NO_STATE

    def adopt(self, segment: LiveSegment, now: int, before: int) -> None:
        """Take over the state slots of a row.

        Args:
            segment: The segment made of the row.
            now: Slot of the state at the position up to which the segment is computed.
            before: Slot of the state one token earlier; NO_STATE for none.
        """
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

    def find_state_position(self, prefix: CachedPrefix, most: int) -> int:
        """Return the last position up to `most` at which a prefix has a state, or 0."""
        length = len(prefix.tokens)
        at = {length: prefix.end_state, length - 1: prefix.last_state}
        return max((p for p, slot in at.items() if slot != NO_STATE and p <= most), default=0)

    def copy_from(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> None:
        """Copy the state of a kept prefix at a position into a segment.

        Args:
            prefix: The kept prefix.
            segment: The segment.
            covered: The position, which is within the segment.
        """
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

    def reset(self, kept: Slots) -> None:
        """Free all slots but those of kept prefixes."""
        self.cache.reset(kept)
