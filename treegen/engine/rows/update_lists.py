"""Where rows that list updates of a state have what they need, from their first step to their last.

A row starts from the state of the segment above it, which all its siblings read. It owns a window
of the convolution, and pages for the list of its updates. That is all that a row takes whose limit
is not far. Any other row also owns a slot. Until its list is folded the slot is cut into further
pages of the list. Then it has the row's own state.

What a row can ever need it takes when it starts. So no row has to give way for another one's state.
"""

from __future__ import annotations

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import StateInputs
from treegen.engine.rows.table import RowTable
from treegen.engine.rows.token_store import grow_arrays
from treegen.engine.segments.segment_states import StateSpan
from treegen.model.recurrent.state_batch import fold_lists
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache

_NEVER = 1 << 40


class RowUpdateLists:
    """The windows, pages and slots that active rows own.

    Arrays over the slots of the row table:
    base: slot of the state that the list goes on from. listed: how many updates it has.
    fold_at: how many it has when it is folded.
    own: the slot that the row owns; NO_STATE for none.
    window: the window that it owns. window_at: where its window is now.
    inputs: how many tokens it has computed.
    pages: of its list, first those that it owns beside its slot. num_pages: how many these are.
    """

    per_row = 2  # slots that a row takes at most, its pages included

    def __init__(self, rows: RowTable, cache: StateCache) -> None:
        """No row owns any."""
        assert cache.delta is not None
        self._rows, self._cache, self._spec = rows, cache, cache.delta
        nothing = np.zeros(0, dtype=np.int64)
        self.base = self.listed = self.fold_at = self.own = nothing
        self.window = self.window_at = self.inputs = self.num_pages = nothing
        self.pages = np.zeros((0, self._spec.pages + self._spec.own_pages), dtype=np.int64)

    def _fit(self) -> None:
        """Let the arrays be as long as the row table's."""
        num = len(self._rows.request)
        if num > len(self.base):
            grow_arrays(self, num)

    def _needs(self, slots: Ints, siblings: Ints) -> tuple[Ints, Ints]:
        """How many pages and slots new rows need, of which each has so many siblings."""
        spec, rows = self._spec, self._rows
        to_come = rows.limit[slots] - rows.count[slots]
        different, place = np.unique(siblings, return_inverse=True)
        shared = np.array([spec.shared_tokens(num) for num in different.tolist()], dtype=np.int64)
        resumes = rows.count[slots] > 1
        owns = resumes | (to_come > shared[place])
        pages = np.where(owns, spec.own_pages, (-(-to_come // spec.page_tokens)).clip(min=1))
        return pages, owns.astype(np.int64)

    def count_startable(self, slots: Ints, siblings: Ints) -> int:
        """How many rows, the first ones of these, can start. siblings: of each."""
        cache, per_slot = self._cache, self._spec.pages
        pages, owned = (each.cumsum() for each in self._needs(slots, siblings))
        cut = -(-(pages - cache.num_cut_pages).clip(min=0) // per_slot)
        fit = int((owned + cut <= cache.num_free).sum())
        return min(fit, cache.num_free_windows)

    def take(self, slots: Ints, source: int, siblings: int) -> None:
        """Give rows of one request what they need. source: where the state of their prompt is."""
        spec, cache = self._spec, self._cache
        self._fit()
        num_siblings = np.full(len(slots), siblings)
        num_pages, owned = self._needs(slots, num_siblings)
        self.base[slots] = self.window_at[slots] = source
        self.listed[slots] = self.inputs[slots] = 0
        self.window[slots] = cache.allocate_windows(len(slots))
        self.own[slots] = NO_STATE
        owners = slots[owned > 0]
        self.own[owners] = cache.allocate(len(owners))
        self.pages[slots] = 0
        self.num_pages[slots] = num_pages
        place = np.arange(self.pages.shape[1]) < num_pages[:, None]
        mine = np.zeros_like(place, dtype=np.int64)
        mine[place] = cache.allocate_pages(int(num_pages.sum()))
        self.pages[slots] = mine
        cut = self.own[owners, None] * spec.pages + np.arange(spec.pages)
        self.pages[owners, spec.own_pages : spec.own_pages + spec.pages] = cut
        self.fold_at[slots] = _NEVER
        self.fold_at[owners] = spec.shared_tokens(siblings)

    def release(self, slots: Ints) -> None:
        """Take from rows that leave what they own."""
        self._fit()
        slots = slots[self.window[slots] > 0]
        own, pages, windows = self.get_owned_slots(slots)
        self._cache.free_pages(pages)
        self._cache.free_windows(windows)
        self._cache.free(own.tolist())
        self._forget(slots)

    def _forget(self, slots: Ints) -> None:
        self.own[slots], self.window[slots], self.num_pages[slots] = NO_STATE, 0, 0

    def get_owned_slots(self, slots: Ints) -> tuple[Slots, Slots, Slots]:
        """The slots that rows own, the pages beside these, and the windows."""
        is_own = np.arange(self.pages.shape[1]) < self.num_pages[slots, None]
        return self.own[slots], self.pages[slots][is_own], self.window[slots]

    def clear(self) -> None:
        """Forget all rows; the caller has freed what they own."""
        self._forget(np.arange(len(self.base)))

    def step(self, order: Ints) -> StateInputs:
        """What a decode step of rows reads and writes, and the lists that are folded before it."""
        folds = self._fold(order[self.listed[order] >= self.fold_at[order]])
        inputs = np.stack(
            [self.base[order], self.listed[order], self.window_at[order], self.window[order]]
        )
        self.window_at[order] = self.window[order]
        self.listed[order] += 1
        self.inputs[order] += 1
        return StateInputs(np.concatenate([inputs, self.pages[order].T]), folds)

    def _fold(self, slots: Ints) -> list[Ints]:
        """Give rows whose lists are full states of their own: [3 + P, F] for each part of them.

        By row these are the state that the list goes on from, the slot for the new one, how many
        updates there are, and the pages.
        """
        spec, cache = self._spec, self._cache
        folds: list[Ints] = []
        # A list that has not reached the row's slot leaves the slot to the state.
        in_place = self.listed[slots] <= spec.own_pages * spec.page_tokens
        parts = [slots[in_place]]
        moving = slots[~in_place]
        while len(moving):
            parts.append(moving[: cache.num_free + 1])
            moving = moving[len(parts[-1]) :]
        for at, part in enumerate(parts):
            if not len(part):
                continue
            target = self.own[part] if at == 0 else cache.allocate(len(part) - 1)
            if at:
                target = np.append(target, cache.spare)
            told = np.stack([self.base[part], target, self.listed[part]])
            folds.append(np.concatenate([told, self.pages[part].T]))
            if at:  # what the lists were in is free once the states are made of them
                before = self.own[part]
                cache.spare = int(before[-1])
                cache.free(before[:-1].tolist())
            self.own[part] = self.base[part] = target
            self.listed[part] = 0
            self.fold_at[part] = min(spec.own_tokens, spec.own_pages * spec.page_tokens)
        return folds

    def span(self, slot: int, num: int) -> StateSpan:
        """What computing the next `num` tokens of a row at once reads and writes.

        Such a row resumes. It goes on from a state of its own.
        """
        own = int(self.own[slot])
        assert own != NO_STATE and not self.listed[slot], "a row that resumes has no state"
        reads = int(self.base[slot])
        self.base[slot] = self.window_at[slot] = own
        self.inputs[slot] += num
        self.fold_at[slot] = min(
            self._spec.own_tokens, self._spec.own_pages * self._spec.page_tokens
        )
        return StateSpan(reads, NO_STATE, own)

    def transfer_states(self, slot: int, num_generated: int) -> tuple[int, int, int]:
        """What a row that has ended leaves to a segment that begins with `num_generated` tokens.

        Returns how many of these a state has seen, the slot of that state and the slot of the state
        one token earlier; NO_STATE for what there is none of. The states are made of its list.
        """
        inputs, listed = int(self.inputs[slot]), int(self.listed[slot])
        if 0 < inputs <= num_generated:
            found, wanted = inputs, [listed, listed - 1][: 1 + (inputs > 1)]
        elif 1 < inputs == num_generated + 1:
            found, wanted = num_generated, [listed - 1]
        else:
            found, wanted = 0, []
        made = [self._materialize_state(slot, num) for num in wanted]
        at = np.array([slot])
        self.release(at)
        if not made or made[0] == NO_STATE:
            self._cache.free(made)
            return 0, NO_STATE, NO_STATE
        return found, made[0], made[1] if len(made) > 1 else NO_STATE

    def _materialize_state(self, slot: int, listed: int) -> int:
        """A slot with the state after the first updates of a row's list; NO_STATE for none."""
        cache = self._cache
        if listed < 0 or not cache.num_free:
            return NO_STATE
        target = cache.allocate_one()
        told = np.array([[self.base[slot]], [target], [listed]])
        fold_lists(cache, [np.concatenate([told, self.pages[slot, :, None]])])
        behind = int(self.listed[slot]) - listed
        for windows, _ in cache.layers:
            # The first column of a window has no part in what comes next.
            window = windows[int(self.window_at[slot])]
            windows[target].copy_(window.roll(behind, -1) if behind else window)
        return target
