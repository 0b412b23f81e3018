"""How the engine calls optional features of samples, and recurrent states of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.token_store import grow_arrays
from treegen.engine.segments.segment import LiveRequest, LiveSegment, StateSpan
from treegen.ops.cache.state_cache import Slots

CountSiblings = Callable[[Ints], Ints]
"""Returns the number of rows of each slot's request."""


class RowFeature:
    """An optional feature of samples.

    A subclass keeps its numbers of rows in arrays over the slots of the row table.

    Attributes:
        used: Whether any row has used it; until then, a step does not call it.
    """

    _fill = 0  # value of new elements of its arrays

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row uses the feature yet."""
        self._run, self.used = run, False

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Set up new rows, in place of earlier rows in the same slots.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        raise NotImplementedError

    def _fit(self) -> None:
        """Grow the arrays to the length of the row table's."""
        grow_arrays(self, len(self._run.rows.phase), self._fill)


class RowStates:
    """States of the rows of a model without recurrent layers: none, so no method has an effect.

    Other models have those of `treegen.engine.features`: `InPlaceRowStates`, `RowUpdateLists`.
    """

    def count_startable(self, slots: Ints, count_siblings: CountSiblings) -> int:
        """Return how many rows, from the first on, can start; `slots` are those of the rows."""
        return len(slots)

    def count_missing(self, more: int, *, has_row: bool) -> int:
        """Return how many slots are missing to start a request.

        Args:
            more: Number of slots that its segments need.
            has_row: Whether it needs those of a row too.
        """
        return 0

    def take(self, slots: Ints, source: int, count_siblings: CountSiblings) -> None:
        """Allocate what rows of one request need.

        Args:
            slots: Row slots.
            source: State slot of their prompt.
            count_siblings: Returns the number of rows of each slot's request.
        """

    def release(self, slots: Ints) -> None:
        """Free what rows own that leave."""

    def can_leave_segments(self, slots: Ints) -> bool:
        """Return whether the slots suffice for `leave_segments`; `slots` are active rows."""
        return True

    def leave_segments(self, slots: Ints, segments: Sequence[LiveSegment]) -> None:
        """Keep what rows have read of the states of segments that are about to be computed again.

        Args:
            slots: Slots of the active rows.
            segments: The segments, which may get other slots for their states.
        """

    def clear(self) -> None:
        """Drop all rows; the caller has freed what they own."""

    def step(self, order: Ints) -> StateInputs | None:
        """Return the state inputs of a decode step of rows."""
        return None

    def span(self, slot: int, num: int) -> StateSpan | None:
        """Return the state slots for computing the next `num` tokens of a row in one pass."""
        return None

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int] | None:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier, NO_STATE for a missing state; None without recurrent layers.
        """
        return None

    def check(self, active: Ints, segment_slots: Sequence[Slots]) -> None:
        """Assert that every slot has one owner.

        Args:
            active: Slots of the active rows.
            segment_slots: State slots of other owners.
        """
