"""Recurrent states of segments: after the last token, and in searches also one token earlier.

Rows and segments below a segment read the state after its last token. To draw from a segment again,
the logits of its last token are needed, and so the state before that token. Searches keep both
states; other runs keep only the first. Then a segment that is drawn from again is computed again in
another slot, while other requests still read the state at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.rows.engine_run import CountSiblings, RowStates
from treegen.engine.rows.table import RowTable
from treegen.engine.rows.token_store import grow_arrays
from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.engine.segments.segment import LiveRequest, LiveSegment, SegmentStates, StateSpan
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache


class RecurrentSegmentStates(SegmentStates):
    """The slots that segments own: `end_state` and `penultimate_state` of LiveSegment.

    The state of a complete segment is in `end_state`. While a segment is only partly computed, its
    running state is in `penultimate_state` if that is kept, and otherwise in `end_state`.
    """

    exist = True

    def __init__(self, cache: StateCache, *, recomputes_last: bool) -> None:
        """Set up a run; `recomputes_last` is whether last tokens may be computed again."""
        self.cache = cache
        self._recomputes_last = recomputes_last

    def _keeps_penultimate(self, segment: LiveSegment) -> bool:
        # Before the only token of a segment the state is that of the segment above.
        return len(segment.tokens) > 1 and (
            self._recomputes_last or segment.penultimate_state != NO_STATE
        )

    @staticmethod
    def _is_end_read(segment: LiveSegment, computed: int) -> bool:
        """Return whether requests read the end of a segment that is computed again."""
        is_whole = segment.computed == segment.stop
        return is_whole and computed < segment.stop - 1 and bool(segment.openers)

    def fits(self, depth: int, requests: Collection[LiveRequest]) -> bool:
        """Return whether each request alone has enough slots, at the end of `depth` segments."""
        has_rows = any(request.spec.rows for request in requests)
        return not requests or 2 * (depth + has_rows) <= self.cache.num_slots

    def find_recompute_position(self, segment: LiveSegment) -> int:
        """Return from where a segment is computed again for the logits of its last token."""
        last = segment.stop - 1
        return last if segment.penultimate_state or last == segment.start else segment.start

    def find_source(self, segment: LiveSegment, computed: int) -> LiveSegment | None:
        """Return the segment above if a segment continues from its end, being computed so far."""
        return segment.parent if computed == segment.start else None

    def allocate_recompute_slot(self, segment: LiveSegment, computed: int) -> None:
        """Allocate a slot to compute a segment again, if requests still read the state at its end.

        Args:
            segment: The segment.
            computed: The position from which it is computed.
        """
        if self._is_end_read(segment, computed):
            segment.penultimate_state = self.cache.allocate_one()

    def count_missing(self, segment: LiveSegment, computed: int) -> int:
        """Return how many slots a segment that counts as computed up to a position still needs."""
        if computed == segment.stop:
            return 0
        keeps_penultimate = self._keeps_penultimate(segment) or self._is_end_read(segment, computed)
        return (segment.end_state == NO_STATE) + (
            keeps_penultimate and segment.penultimate_state == NO_STATE
        )

    def allocate(self, segment: LiveSegment) -> None:
        """Allocate the missing slots of a segment."""
        if segment.computed < segment.stop:
            segment.end_state = segment.end_state or self.cache.allocate_one()
            if self._keeps_penultimate(segment):
                segment.penultimate_state = segment.penultimate_state or self.cache.allocate_one()

    def free(self, segment: LiveSegment) -> None:
        """Free the slots of a segment."""
        self.cache.free([segment.end_state, segment.penultimate_state])
        segment.end_state = segment.penultimate_state = NO_STATE

    def span(self, segment: LiveSegment, start: int, stop: int) -> StateSpan:
        """Return the state slots for computing a part of a segment.

        Args:
            segment: The segment.
            start: Position of the first token.
            stop: Position after the last token.
        """
        running = (
            segment.penultimate_state if self._keeps_penultimate(segment) else segment.end_state
        )
        read_slot = running
        if start == segment.start:
            read_slot = segment.parent.end_state if segment.parent is not None else NO_STATE
            assert read_slot != NO_STATE or segment.parent is None, "a parent has no state"
        if stop < segment.stop:
            return StateSpan(read_slot, NO_STATE, running)
        keeps_penultimate = self._recomputes_last and running != segment.end_state
        penultimate_slot = running if keeps_penultimate and start < stop - 1 else NO_STATE
        return StateSpan(read_slot, penultimate_slot, segment.end_state)

    def on_computed(self, segment: LiveSegment) -> None:
        """Free the slot in which a now complete segment was computed again."""
        if not self._recomputes_last:
            self.on_recompute_dropped(segment)

    def on_recompute_dropped(self, segment: LiveSegment) -> None:
        """Drop the running state of a segment that was computed again; its end state is valid."""
        self.cache.free([segment.penultimate_state])
        segment.penultimate_state = NO_STATE

    def on_idle(self, segment: LiveSegment) -> None:
        """Free the end state of an incomplete segment, and store its running state there.

        Nothing reads the end state now.
        """
        if not self._recomputes_last and segment.penultimate_state != NO_STATE:
            self.cache.free([segment.end_state])
            segment.end_state, segment.penultimate_state = segment.penultimate_state, NO_STATE

    def adopt(self, segment: LiveSegment, current: int, previous: int) -> None:
        """Take over the state slots of a row.

        Args:
            segment: The segment made of the row.
            current: Slot of the state at the position up to which the segment is computed.
            previous: Slot of the state one token earlier; NO_STATE for none.
        """
        if segment.computed < segment.stop and self._keeps_penultimate(segment):
            segment.penultimate_state, unused = current, previous
        elif segment.computed < segment.stop:
            segment.end_state, unused = current, previous
        else:
            keeps_penultimate = self._keeps_penultimate(segment)
            segment.end_state = current
            segment.penultimate_state, unused = (
                (previous, NO_STATE) if keeps_penultimate else (NO_STATE, previous)
            )
        self.cache.free([unused])

    # Cached prefixes

    def find_state_position(self, prefix: CachedPrefix, limit: int) -> int:
        """Return the last position up to `limit` at which a prefix has a state, or 0."""
        length = len(prefix.tokens)
        at = {length: prefix.end_state, length - 1: prefix.penultimate_state}
        return max((p for p, slot in at.items() if slot != NO_STATE and p <= limit), default=0)

    def copy_from(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> None:
        """Copy the state of a cached prefix at a position into a segment.

        Args:
            prefix: The cached prefix.
            segment: The segment.
            covered: The position, which is within the segment.
        """
        is_whole = covered == len(prefix.tokens)
        source = prefix.end_state if is_whole else prefix.penultimate_state
        keeps_penultimate = self._keeps_penultimate(segment)
        if covered < segment.stop and keeps_penultimate:
            self.cache.copy(source, segment.penultimate_state)
            return
        self.cache.copy(source, segment.end_state)
        if covered == segment.stop and keeps_penultimate:
            if is_whole and prefix.penultimate_state:
                self.cache.copy(prefix.penultimate_state, segment.penultimate_state)
            else:
                self.cache.free([segment.penultimate_state])
                segment.penultimate_state = NO_STATE

    def reset(self, cached: Slots) -> None:
        """Free all slots but those of cached prefixes."""
        self.cache.reset(cached)


class RecurrentRowStates(RowStates):
    """Base class of the states of rows in models with recurrent layers."""

    per_row: int
    """Maximum number of slots that a row takes."""
    num_computed: Ints
    """Number of tokens that each row has computed, by slot of the row table."""

    def __init__(self, rows: RowTable, cache: StateCache) -> None:
        """Set up a run in which no row owns a slot."""
        self._rows, self._cache = rows, cache
        self._orphaned: list[int] = []  # slots of states that only rows still read

    def count_missing(self, segment_slots: int, *, has_row: bool) -> int:
        """Return how many slots are missing to start a request.

        Args:
            segment_slots: Number of slots that its segments need.
            has_row: Whether it needs those of a row too.
        """
        return max(segment_slots + has_row * self.per_row - self._cache.num_free, 0)

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, Slots | None, Slots | None]:
        """Return the state slots that rows own, their pages outside of these, and their windows."""
        raise NotImplementedError

    def check(self, active: Ints, segment_slots: Sequence[Slots]) -> None:
        """Assert that every slot, page and window has one owner.

        Args:
            active: Slots of the active rows.
            segment_slots: State slots of other owners.
        """
        owned, pages, windows = self.get_owned_slots(active)
        orphaned = np.array(self._orphaned, dtype=np.int64)
        self._cache.check([*segment_slots, owned, orphaned], pages, windows)

    def _grow_arrays(self) -> None:
        """Grow the arrays to the length of the row table's."""
        num = len(self._rows.request)
        if num > len(self.num_computed):
            grow_arrays(self, num)


class InPlaceRowStates(RecurrentRowStates):
    """The states of rows that own state slots, which are updated in place.

    The attributes are arrays over the slots of the row table.

    Attributes:
        current: State slot after the row's last input token.
        previous: State slot one input token earlier; NO_STATE if the row owns only one slot.
        prompt_state: State slot after the row's prompt, which the row does not own.
    """

    def __init__(self, rows: RowTable, cache: StateCache, *, per_row: int) -> None:
        """Set up a run in which no row owns any of its `per_row` slots."""
        super().__init__(rows, cache)
        self.per_row = per_row
        empty = np.zeros(0, dtype=np.int64)
        self.current = self.previous = self.prompt_state = self.num_computed = empty

    def count_startable(self, slots: Ints, count_siblings: CountSiblings) -> int:
        """Return how many rows, from the first on, can start; `slots` are those of the rows."""
        return self._cache.num_free // self.per_row

    def take(self, slots: Ints, source: int, count_siblings: CountSiblings) -> None:
        """Allocate the slots of rows.

        Args:
            slots: Row slots.
            source: State slot of their prompt.
            count_siblings: Not used here.
        """
        self._grow_arrays()
        allocated = self._cache.allocate(len(slots) * self.per_row).reshape(self.per_row, -1)
        self.prompt_state[slots], self.current[slots] = source, allocated[0]
        self.previous[slots] = allocated[1] if self.per_row > 1 else NO_STATE
        self.num_computed[slots] = 0

    def release(self, slots: Ints) -> None:
        """Free the state slots of rows that leave."""
        self._grow_arrays()
        self._cache.free(self.get_owned_slots(slots)[0].tolist())
        for array in (self.prompt_state, self.current, self.previous):
            array[slots] = NO_STATE

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, None, None]:
        """Return the state slots that rows own; NO_STATE where they own none."""
        return np.concatenate([self.current[slots], self.previous[slots]]), None, None

    def clear(self) -> None:
        """Drop all rows; the caller has freed their slots."""
        self.current[:] = self.previous[:] = NO_STATE

    def step(self, order: Ints) -> StateInputs:
        """Return the state slots that a decode step of rows reads and writes."""
        current, previous = self.current[order], self.previous[order]
        is_first = self.num_computed[order] == 0
        stays = is_first | (previous == NO_STATE)
        read_slots = np.where(is_first, self.prompt_state[order], current)
        write_slots = np.where(stays, current, previous)
        self.current[order], self.previous[order] = write_slots, np.where(stays, previous, current)
        self.num_computed[order] += 1
        return StateInputs(np.stack([read_slots, write_slots]))

    def span(self, slot: int, num: int) -> StateSpan:
        """Return the state slots for computing the next `num` tokens of a row in one pass."""
        current, previous = int(self.current[slot]), int(self.previous[slot])
        read_slot = current if self.num_computed[slot] else int(self.prompt_state[slot])
        self.num_computed[slot] += num
        if previous == NO_STATE or (num == 1 and read_slot != current):
            return StateSpan(read_slot, NO_STATE, current)
        self.current[slot], self.previous[slot] = previous, current
        return StateSpan(read_slot, current if num > 1 else NO_STATE, previous)

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int]:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        The row does not own these states any more.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier; NO_STATE for a missing state.
        """
        num_computed = int(self.num_computed[slot])
        current, previous = int(self.current[slot]), int(self.previous[slot])
        states = 0, NO_STATE, NO_STATE
        # The state before the first input is the prompt's.
        if 0 < num_computed <= num_generated:
            states = num_computed, current, previous if num_computed > 1 else NO_STATE
        elif 1 < num_computed == num_generated + 1 and previous != NO_STATE:
            states = num_generated, previous, NO_STATE
        self._cache.free({current, previous} - set(states[1:]))
        self.current[slot] = self.previous[slot] = NO_STATE
        return states
