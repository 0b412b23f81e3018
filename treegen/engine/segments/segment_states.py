"""Recurrent states of segments, as the store calls them; a model without any does nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.ops.cache.state_cache import Slots


class StateSpan(NamedTuple):
    """Slots of the states around consecutive tokens of a segment or row."""

    reads: int
    """Slot of the state before the first token."""
    leaves: int
    """Slot for the state before the last token; NO_STATE if it is not needed or exists."""
    writes: int
    """Slot for the state after the last token."""


class SegmentStates:
    """States of the segments of a model without recurrent layers: none, so no method has an effect.

    `treegen.engine.features.segment_states` has those of other models.
    """

    exist = False
    """Whether segments have states. Then a text can be continued only where one was kept."""

    def fit(self, depth: int, requests: Sequence[LiveRequest]) -> bool:
        """Return whether each request alone has enough slots, at the end of `depth` segments."""
        return True

    def find_rewind_position(self, segment: LiveSegment) -> int:
        """Return from where a segment is computed again for the logits of its last token."""
        return segment.stop - 1

    def find_source(self, segment: LiveSegment, computed: int) -> LiveSegment | None:
        """Return the segment from whose end state a segment continues that is computed so far.

        Args:
            segment: The segment.
            computed: The position up to which it is computed.

        Returns:
            The segment above; None if the segment needs no state, or has one itself.
        """
        return None

    def leave_end(self, segment: LiveSegment, computed: int) -> None:
        """Allocate a slot to compute a segment again, if requests still read the state at its end.

        Args:
            segment: The segment.
            computed: The position from which it is computed.
        """

    def missing(self, segment: LiveSegment, computed: int) -> int:
        """Return how many slots a segment that counts as computed up to a position still needs."""
        return 0

    def place(self, segment: LiveSegment) -> None:
        """Allocate the missing slots of a segment."""

    def free(self, segment: LiveSegment) -> None:
        """Free the slots of a segment."""

    def span(self, segment: LiveSegment, start: int, stop: int) -> StateSpan | None:
        """Return the state slots for computing a part of a segment.

        Args:
            segment: The segment.
            start: Position of the first token.
            stop: Position after the last token.
        """
        return None

    def on_whole(self, segment: LiveSegment) -> None:
        """Free the slot in which a now complete segment was computed again."""

    def on_undone(self, segment: LiveSegment) -> None:
        """Drop the running state of a segment that was computed again; its end state is valid."""

    def on_idle(self, segment: LiveSegment) -> None:
        """Free the end state of an incomplete segment, and store its running state there.

        Nothing reads the end state now.
        """

    def adopt(self, segment: LiveSegment, now: int, before: int) -> None:
        """Take over the state slots of a row.

        Args:
            segment: The segment made of the row.
            now: Slot of the state at the position up to which the segment is computed.
            before: Slot of the state one token earlier; NO_STATE for none.
        """

    def find_state_position(self, prefix: CachedPrefix, most: int) -> int:
        """Return the last position up to `most` from which a kept prefix can be continued, or 0."""
        return most

    def copy_from(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> None:
        """Copy the state of a kept prefix at a position into a segment.

        Args:
            prefix: The kept prefix.
            segment: The segment.
            covered: The position, which is within the segment.
        """

    def reset(self, kept: Slots) -> None:
        """Free all slots but those of kept prefixes."""
