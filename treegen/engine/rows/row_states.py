"""State slots of rows whose recurrent states are updated in place.

A row owns a slot, which each of its tokens reads and writes. Its first token reads the state of the
segment above, in that segment's slot, so that a fork copies nothing. In a search a row owns two
slots and its tokens alternate between them: a finished sample becomes a segment, and drawing from
this segment needs the state before its last token.
"""

from __future__ import annotations

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.segment_states import StateSpan
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache


class RowStates:
    """The slots that active rows own: `state_now`, `state_before`, `state_from` and `inputs`.

    per_row: number of slots of each row.
    """

    def __init__(self, rows: RowTable, cache: StateCache, *, per_row: int) -> None:
        """Set up a run in which no row owns a slot."""
        self._rows, self._cache = rows, cache
        self.per_row = per_row

    def count_startable(self, slots: Ints, siblings: Ints) -> int:
        """Return how many rows have room; `slots` and `siblings` do not matter here."""
        return self._cache.num_free // self.per_row

    def take(self, slots: Ints, source: int, siblings: int) -> None:
        """Allocate the slots of rows.

        Args:
            slots: Row slots.
            source: State slot of their prompt.
            siblings: Number of rows of the request; not used here.
        """
        rows = self._rows
        taken = self._cache.allocate(len(slots) * self.per_row).reshape(self.per_row, -1)
        rows.state_from[slots], rows.state_now[slots] = source, taken[0]
        rows.state_before[slots] = taken[1] if self.per_row > 1 else NO_STATE
        rows.inputs[slots] = 0

    def release(self, slots: Ints) -> None:
        """Free the state slots of rows that leave."""
        self._cache.free(self.get_owned_slots(slots)[0].tolist())
        for array in (self._rows.state_from, self._rows.state_now, self._rows.state_before):
            array[slots] = NO_STATE

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, None, None]:
        """Return the state slots that rows own; NO_STATE where they own none."""
        rows = self._rows
        return np.concatenate([rows.state_now[slots], rows.state_before[slots]]), None, None

    def clear(self) -> None:
        """Drop all rows; the caller has freed their slots."""
        self._rows.state_now[:] = self._rows.state_before[:] = NO_STATE

    def step(self, order: Ints) -> StateInputs:
        """Return the state slots that a decode step of rows reads and writes."""
        rows = self._rows
        now, before = rows.state_now[order], rows.state_before[order]
        is_first = rows.inputs[order] == 0
        stays = is_first | (before == NO_STATE)
        reads = np.where(is_first, rows.state_from[order], now)
        writes = np.where(stays, now, before)
        rows.state_now[order], rows.state_before[order] = writes, np.where(stays, before, now)
        rows.inputs[order] += 1
        return StateInputs(np.stack([reads, writes]))

    def span(self, slot: int, num: int) -> StateSpan:
        """Return the state slots for computing the next `num` tokens of a row in one pass."""
        rows = self._rows
        now, before = int(rows.state_now[slot]), int(rows.state_before[slot])
        reads = now if rows.inputs[slot] else int(rows.state_from[slot])
        rows.inputs[slot] += num
        if before == NO_STATE or (num == 1 and reads != now):
            return StateSpan(reads, NO_STATE, now)
        rows.state_now[slot], rows.state_before[slot] = before, now
        return StateSpan(reads, now if num > 1 else NO_STATE, before)

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int]:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        The row does not own these states any more.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier; NO_STATE for a missing state.
        """
        rows = self._rows
        inputs = int(rows.inputs[slot])
        now, before = int(rows.state_now[slot]), int(rows.state_before[slot])
        found = 0, NO_STATE, NO_STATE
        # The state before the first input is the prompt's.
        if 0 < inputs <= num_generated:
            found = inputs, now, before if inputs > 1 else NO_STATE
        elif 1 < inputs == num_generated + 1 and before != NO_STATE:
            found = num_generated, before, NO_STATE
        self._cache.free({now, before} - set(found[1:]))
        rows.state_now[slot] = rows.state_before[slot] = NO_STATE
        return found
