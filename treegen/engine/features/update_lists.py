"""State slots, pages and convolution windows of rows that keep update lists.

A row starts from the state of the segment above it, which all its siblings read. It owns a window
of the convolution, and pages for the list of its updates. A row with a low limit needs no more. Any
other row also owns a state slot, which is cut into further pages of the list until the list is
folded; then it holds the row's own state.

A row allocates all that it can ever need when it starts. So no row is preempted for another row's
state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.features.recurrent_states import RecurrentRowStates
from treegen.engine.rows.engine_run import CountSiblings
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.segment import LiveSegment, StateSpan
from treegen.model.recurrent.state_batch import fold_lists
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache

_NEVER = 1 << 40


class RowUpdateLists(RecurrentRowStates):
    """The windows, pages and state slots that active rows own.

    The attributes are arrays over the slots of the row table.

    Attributes:
        base: Slot of the state to which the row's list applies.
        listed: Number of updates in the list.
        fold_at: Number of updates at which the list is folded.
        owned: The state slot that the row owns; NO_STATE for none.
        window: Slot of the convolution window that the row owns.
        window_at: Slot of the row's current window, which is its prompt's before the first step.
        num_computed: Number of tokens that the row has computed.
        pages: Pages of the list, first those that the row owns in addition to its slot.
        num_pages: Number of pages that the row owns in addition to its slot.
    """

    per_row = 2  # maximum number of slots that a row takes, its pages included

    def __init__(self, rows: RowTable, cache: StateCache) -> None:
        """Set up a run in which no row owns anything."""
        super().__init__(rows, cache)
        assert cache.delta is not None
        self._spec = spec = cache.delta
        # Number of updates at which the list of a row with a state of its own is folded.
        self._own_fold_at = min(spec.own_tokens, spec.own_pages * spec.page_tokens)
        empty = np.zeros(0, dtype=np.int64)
        self.base = self.listed = self.fold_at = self.owned = empty
        self.window = self.window_at = self.num_computed = self.num_pages = empty
        self.pages = np.zeros((0, spec.pages + spec.own_pages), dtype=np.int64)

    def _count_required(self, slots: Ints, siblings: Ints) -> tuple[Ints, Ints]:
        """Return how many pages and slots each new row needs; `siblings` has each row's count."""
        spec, rows = self._spec, self._rows
        to_come = rows.limit[slots] - rows.count[slots]
        different, inverse = np.unique(siblings, return_inverse=True)
        shared = np.array([spec.shared_tokens(num) for num in different.tolist()], dtype=np.int64)
        resumes = rows.count[slots] > 1
        owns = resumes | (to_come > shared[inverse])
        pages = np.where(owns, spec.own_pages, (-(-to_come // spec.page_tokens)).clip(min=1))
        return pages, owns.astype(np.int64)

    def count_startable(self, slots: Ints, count_siblings: CountSiblings) -> int:
        """Return how many rows, from the first on, can start; `slots` are those of the rows."""
        cache, per_slot = self._cache, self._spec.pages
        num_pages, num_owned = self._count_required(slots, count_siblings(slots))
        pages, owned = num_pages.cumsum(), num_owned.cumsum()
        cut = -(-(pages - cache.num_cut_pages).clip(min=0) // per_slot)
        fit = int((owned + cut <= cache.num_free).sum())
        return min(fit, cache.num_free_windows)

    def take(self, slots: Ints, source: int, count_siblings: CountSiblings) -> None:
        """Allocate the windows, pages and state slots of rows of one request.

        Args:
            slots: Row slots, [rows].
            source: State slot of their prompt.
            count_siblings: Returns the number of rows of each slot's request.
        """
        spec, cache = self._spec, self._cache
        self._grow_arrays()
        siblings = int(count_siblings(slots[:1])[0])
        num_pages, owned = self._count_required(slots, np.full(len(slots), siblings))
        self.base[slots] = self.window_at[slots] = source
        self.listed[slots] = self.num_computed[slots] = 0
        self.window[slots] = cache.allocate_windows(len(slots))
        self.owned[slots] = NO_STATE
        owners = slots[owned > 0]
        self.owned[owners] = cache.allocate(len(owners))
        self.pages[slots] = 0
        self.num_pages[slots] = num_pages
        is_used = np.arange(self.pages.shape[1]) < num_pages[:, None]
        new_pages = np.zeros_like(is_used, dtype=np.int64)
        new_pages[is_used] = cache.allocate_pages(int(num_pages.sum()))
        self.pages[slots] = new_pages
        cut = self.owned[owners, None] * spec.pages + np.arange(spec.pages)
        self.pages[owners, spec.own_pages : spec.own_pages + spec.pages] = cut
        self.fold_at[slots] = _NEVER
        self.fold_at[owners] = spec.shared_tokens(siblings)

    def release(self, slots: Ints) -> None:
        """Free the windows, pages and state slots of rows that leave."""
        self._grow_arrays()
        slots = slots[self.window[slots] > 0]
        owned_slots, pages, windows = self.get_owned_slots(slots)
        self._cache.free_pages(pages)
        self._cache.free_windows(windows)
        self._cache.free(owned_slots.tolist())
        self._clear_ownership(slots)
        if self._orphaned:
            read = self.base[self.window > 0]
            unread = [slot for slot in self._orphaned if slot not in read]
            self._cache.free(unread)
            self._orphaned = [slot for slot in self._orphaned if slot in read]

    def can_leave_segments(self, slots: Ints) -> bool:
        """Return whether the slots suffice for `leave_segments`; `slots` are active rows."""
        return len(self._read_bases(slots)) <= self._cache.num_free

    def leave_segments(self, slots: Ints, segments: Sequence[LiveSegment]) -> None:
        """Keep the states to which the lists of rows apply; the segments get other slots.

        Args:
            slots: Slots of the active rows.
            segments: The segments.
        """
        read = set(self._read_bases(slots).tolist())
        for segment in segments:
            if segment.end_state in read:
                new = self._cache.allocate_one()
                waiting = slots[
                    (self.base[slots] == segment.end_state) & (self.num_computed[slots] == 0)
                ]
                self.base[waiting] = self.window_at[waiting] = new
                self._orphaned.append(segment.end_state)
                segment.end_state = new

    def _read_bases(self, slots: Ints) -> Ints:
        """Return the slots of segments to whose states the lists of rows apply."""
        self._grow_arrays()
        begun = slots[self.num_computed[slots] > 0]
        return np.setdiff1d(self.base[begun], [*self.owned[begun], *self._orphaned])

    def _clear_ownership(self, slots: Ints) -> None:
        self.owned[slots], self.window[slots], self.num_pages[slots] = NO_STATE, 0, 0

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, Slots, Slots]:
        """Return the state slots that rows own, their pages outside of these, and their windows."""
        is_own = np.arange(self.pages.shape[1]) < self.num_pages[slots, None]
        return self.owned[slots], self.pages[slots][is_own], self.window[slots]

    def clear(self) -> None:
        """Drop all rows; the caller has freed their slots, pages and windows."""
        self._clear_ownership(np.arange(len(self.base)))
        self._orphaned.clear()

    def step(self, order: Ints) -> StateInputs:
        """Return the state inputs of a decode step, and the lists to fold before it."""
        folds = self._fold(order[self.listed[order] >= self.fold_at[order]])
        inputs = np.stack(
            [self.base[order], self.listed[order], self.window_at[order], self.window[order]]
        )
        self.window_at[order] = self.window[order]
        self.listed[order] += 1
        self.num_computed[order] += 1
        return StateInputs(np.concatenate([inputs, self.pages[order].T]), folds)

    def _fold(self, slots: Ints) -> list[Ints]:
        """Fold the full lists of rows into states of their own; return the inputs of each part.

        A part is [3 + P, F] for F rows: the slot of the state to which the list applies, the slot
        of the new state, the number of updates, and the P pages.
        """
        spec, cache = self._spec, self._cache
        folds: list[Ints] = []
        # If the list does not extend into the row's own slot, the new state goes there.
        in_place = self.listed[slots] <= spec.own_pages * spec.page_tokens
        parts = [slots[in_place]]
        moving = slots[~in_place]
        while len(moving):
            parts.append(moving[: cache.num_free + 1])
            moving = moving[len(parts[-1]) :]
        for at, part in enumerate(parts):
            if not len(part):
                continue
            target = self.owned[part] if at == 0 else cache.allocate(len(part) - 1)
            if at:
                target = np.append(target, cache.spare)
            inputs = np.stack([self.base[part], target, self.listed[part]])
            folds.append(np.concatenate([inputs, self.pages[part].T]))
            if at:  # the slots of the lists are free once the lists are folded
                before = self.owned[part]
                cache.spare = int(before[-1])
                cache.free(before[:-1].tolist())
            self.owned[part] = self.base[part] = target
            self.listed[part] = 0
            self.fold_at[part] = self._own_fold_at
        return folds

    def span(self, slot: int, num: int) -> StateSpan:
        """Return the state slots for computing the next `num` tokens of a row in one pass.

        Only resuming rows do so. They continue from a state of their own.
        """
        owned_slot = int(self.owned[slot])
        assert owned_slot != NO_STATE and not self.listed[slot], "a row that resumes has no state"
        read_slot = int(self.base[slot])
        self.base[slot] = self.window_at[slot] = owned_slot
        self.num_computed[slot] += num
        self.fold_at[slot] = self._own_fold_at
        return StateSpan(read_slot, NO_STATE, owned_slot)

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int]:
        """Pass the states of an ended row to a segment that begins with `num_generated` tokens.

        The states are computed from the row's list.

        Returns:
            How many of these tokens a state has seen, the slot of that state, and the slot of the
            state one token earlier; NO_STATE for a missing state.
        """
        num_computed, listed = int(self.num_computed[slot]), int(self.listed[slot])
        if 0 < num_computed <= num_generated:
            num_seen, lengths = num_computed, [listed, listed - 1][: 1 + (num_computed > 1)]
        elif 1 < num_computed == num_generated + 1:
            num_seen, lengths = num_generated, [listed - 1]
        else:
            num_seen, lengths = 0, []
        states = [self._materialize_state(slot, num) for num in lengths]
        at = np.array([slot])
        self.release(at)
        if not states or states[0] == NO_STATE:
            self._cache.free(states)
            return 0, NO_STATE, NO_STATE
        return num_seen, states[0], states[1] if len(states) > 1 else NO_STATE

    def _materialize_state(self, slot: int, listed: int) -> int:
        """Compute the state after the first `listed` updates of a row's list.

        Return its slot; NO_STATE if there is no such state or no free slot.
        """
        cache = self._cache
        if listed < 0 or not cache.num_free:
            return NO_STATE
        target = cache.allocate_one()
        inputs = np.array([[self.base[slot]], [target], [listed]])
        fold_lists(cache, [np.concatenate([inputs, self.pages[slot, :, None]])])
        num_later = int(self.listed[slot]) - listed
        for windows, _ in cache.layers:
            # The first column of a window does not affect later tokens.
            window = windows[int(self.window_at[slot])]
            windows[target].copy_(window.roll(num_later, -1) if num_later else window)
        return target
