"""State slots of rows whose recurrent states are updated in place.

A row owns a slot, which each of its tokens reads and writes. Its first token reads the state of the
segment above, in that segment's slot, so that a fork copies nothing. In a search a row owns two
slots and its tokens alternate between them: a finished sample becomes a segment, and drawing from
this segment needs the state before its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.rows.feature import CountSiblings, RowStates
from treegen.engine.rows.table import RowTable
from treegen.engine.rows.token_store import grow_arrays
from treegen.engine.segments.segment_states import StateSpan
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache


class RecurrentRowStates(RowStates):
    """What rows with recurrent states have in common."""

    per_row: int
    """Maximum number of slots that a row takes."""
    inputs: Ints
    """Number of tokens that each row has computed, by slot of the row table."""

    def __init__(self, rows: RowTable, cache: StateCache) -> None:
        """Set up a run in which no row owns a slot."""
        self._rows, self._cache = rows, cache

    def count_missing(self, more: int, *, has_row: bool) -> int:
        """Return how many slots are missing to start a request.

        Args:
            more: Number of slots that its segments need.
            has_row: Whether it needs those of a row too.
        """
        return max(more + has_row * self.per_row - self._cache.num_free, 0)

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, Slots | None, Slots | None]:
        """Return the state slots that rows own, their pages outside of these, and their windows."""
        raise NotImplementedError

    def check(self, active: Ints, others: Sequence[Slots]) -> None:
        """Assert that every slot, page and window has one owner.

        Args:
            active: Slots of the active rows.
            others: State slots of other owners.
        """
        owned, pages, windows = self.get_owned_slots(active)
        self._cache.check([*others, owned], pages, windows)

    def _fit(self) -> None:
        """Grow the arrays to the length of the row table's."""
        num = len(self._rows.request)
        if num > len(self.inputs):
            grow_arrays(self, num)


class InPlaceRowStates(RecurrentRowStates):
    """Rows that own slots, which are updated in place.

    Arrays over the slots of the row table: now: slot of the state after the row's last input.

    Attributes:
        before: Slot of the state one input earlier.
        source: Slot of the state after the row's prompt.
    """

    def __init__(self, rows: RowTable, cache: StateCache, *, per_row: int) -> None:
        """Set up a run in which no row owns any of its `per_row` slots."""
        super().__init__(rows, cache)
        self.per_row = per_row
        self.now = self.before = self.source = self.inputs = np.zeros(0, dtype=np.int64)

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
        self._fit()
        taken = self._cache.allocate(len(slots) * self.per_row).reshape(self.per_row, -1)
        self.source[slots], self.now[slots] = source, taken[0]
        self.before[slots] = taken[1] if self.per_row > 1 else NO_STATE
        self.inputs[slots] = 0

    def release(self, slots: Ints) -> None:
        """Free the state slots of rows that leave."""
        self._fit()
        self._cache.free(self.get_owned_slots(slots)[0].tolist())
        for array in (self.source, self.now, self.before):
            array[slots] = NO_STATE

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, None, None]:
        """Return the state slots that rows own; NO_STATE where they own none."""
        return np.concatenate([self.now[slots], self.before[slots]]), None, None

    def clear(self) -> None:
        """Drop all rows; the caller has freed their slots."""
        self.now[:] = self.before[:] = NO_STATE

    def step(self, order: Ints) -> StateInputs:
        """Return the state slots that a decode step of rows reads and writes."""
        now, before = self.now[order], self.before[order]
        is_first = self.inputs[order] == 0
        stays = is_first | (before == NO_STATE)
        reads = np.where(is_first, self.source[order], now)
        writes = np.where(stays, now, before)
        self.now[order], self.before[order] = writes, np.where(stays, before, now)
        self.inputs[order] += 1
        return StateInputs(np.stack([reads, writes]))

    def span(self, slot: int, num: int) -> StateSpan:
        """Return the state slots for computing the next `num` tokens of a row in one pass."""
        now, before = int(self.now[slot]), int(self.before[slot])
        reads = now if self.inputs[slot] else int(self.source[slot])
        self.inputs[slot] += num
        if before == NO_STATE or (num == 1 and reads != now):
            return StateSpan(reads, NO_STATE, now)
        self.now[slot], self.before[slot] = before, now
        return StateSpan(reads, now if num > 1 else NO_STATE, before)

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int]:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        The row does not own these states any more.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier; NO_STATE for a missing state.
        """
        inputs = int(self.inputs[slot])
        now, before = int(self.now[slot]), int(self.before[slot])
        states = 0, NO_STATE, NO_STATE
        # The state before the first input is the prompt's.
        if 0 < inputs <= num_generated:
            states = inputs, now, before if inputs > 1 else NO_STATE
        elif 1 < inputs == num_generated + 1 and before != NO_STATE:
            states = num_generated, before, NO_STATE
        self._cache.free({now, before} - set(states[1:]))
        self.now[slot] = self.before[slot] = NO_STATE
        return states
