"""States of recurrent layers: slots in which the state of one sequence at one position is kept.

Keys and values of a token stay what they are, whatever follows. The state of a recurrent layer does
not: each token changes it. So whoever goes on from a position needs the state at that very
position, which is kept in a slot: a convolution window and a recurrent state for each layer. Each
slot has one owner. Slot 0 is never given out; it stands for no state.

Rows of some models keep lists of updates in place of states, see `treegen.ops.recurrence`. A slot
can be cut into pages for such lists. Then the windows of rows lie in slots of their own, which come
after the others and have no room for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.spec import DeltaSpec

NO_STATE = 0
"""The slot of a sequence of no tokens."""

Slots = NDArray[np.int64]


class StateCache:
    """Slots with the tensors that they lie in.

    layers: of each recurrent layer its tensors, [num_slots + 1, ...] each. With lists the first of
    them, the windows, have one slot more for each row, and all have a spare one.
    num_slots: usable slots.
    num_free: slots without an owner.
    delta: how rows list updates; None where all of them have states of their own.
    spare: a slot that always stays free for a state that is moved.
    num_windows: windows of rows.
    num_free_windows: windows without an owner.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor]],
        num_slots: int,
        delta: DeltaSpec | None = None,
    ) -> None:
        """All slots are free; their numbers are 1 to `num_slots`."""
        self.layers = layers
        self.num_slots = self.num_free = num_slots
        self.delta = delta
        self._is_owned = np.zeros(num_slots + 1 + (delta is not None), dtype=np.bool_)
        self.spare = NO_STATE if delta is None else num_slots + 1
        self._is_owned[[NO_STATE, self.spare]] = True
        # Of slots that are cut, which pages have an owner. Slots that are not have none.
        self._is_cut = np.zeros(len(self._is_owned), dtype=np.bool_)
        self._pages = np.zeros((len(self._is_owned), delta.pages if delta else 1), dtype=np.bool_)
        self.num_windows = len(layers[0][0]) - len(self._is_owned) if delta is not None else 0
        self.num_free_windows = self.num_windows
        self._windows = np.zeros(self.num_windows, dtype=np.bool_)

    def allocate(self, count: int) -> Slots:
        """Take `count` free slots; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} slots wanted, {self.num_free} free"
        slots = np.flatnonzero(~self._is_owned)[:count]
        self._is_owned[slots] = True
        self.num_free -= count
        return slots

    def allocate_one(self) -> int:
        """One free slot."""
        return int(self.allocate(1)[0])

    def free(self, slots: Iterable[int]) -> None:
        """Give different slots back; NO_STATE among them is nobody's."""
        owned = np.array([slot for slot in slots if slot != NO_STATE], dtype=np.int64)
        assert self._is_owned[owned].all(), "freed a free slot"
        self._is_owned[owned] = False
        self.num_free += len(owned)

    @property
    def num_cut_pages(self) -> int:
        """Free pages in slots that are cut."""
        return int((~self._pages[self._is_cut]).sum())

    def allocate_pages(self, count: int) -> Slots:
        """Take `count` pages, and cut slots for them; the caller has checked that there are any.

        Page p of slot s has the number s * delta.pages + p.
        """
        per_slot = self._pages.shape[1]
        lacking = count - self.num_cut_pages
        if lacking > 0:
            self._is_cut[self.allocate(-(-lacking // per_slot))] = True
        pages = np.flatnonzero(self._is_cut[:, None] & ~self._pages)[:count]
        self._pages.reshape(-1)[pages] = True
        return pages

    def free_pages(self, pages: Slots) -> None:
        """Give different pages back; slots that have no others are whole again."""
        assert self._pages.reshape(-1)[pages].all(), "freed a free page"
        self._pages.reshape(-1)[pages] = False
        slots = np.unique(pages // self._pages.shape[1])
        whole = slots[~self._pages[slots].any(axis=1)]
        self._is_cut[whole] = False
        self.free(whole.tolist())

    def allocate_windows(self, count: int) -> Slots:
        """Take `count` windows; the caller has checked `num_free_windows`."""
        assert count <= self.num_free_windows, f"{count} windows wanted"
        windows = np.flatnonzero(~self._windows)[:count]
        self._windows[windows] = True
        self.num_free_windows -= count
        return windows + len(self._is_owned)

    def free_windows(self, windows: Slots) -> None:
        """Give different windows back."""
        assert self._windows[windows - len(self._is_owned)].all(), "freed a free window"
        self._windows[windows - len(self._is_owned)] = False
        self.num_free_windows += len(windows)

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one slot to another, in all layers."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[target].copy_(tensor[source])

    def reset(self, slots: Slots) -> None:
        """Forget all owners but those of some slots."""
        self._is_owned[:] = False
        self._is_owned[[NO_STATE, self.spare, *slots]] = True
        self._is_cut[:], self._pages[:], self._windows[:] = False, False, False
        self.num_free = int((~self._is_owned).sum())
        self.num_free_windows = self.num_windows

    def check(
        self, owned: Iterable[Slots], pages: Slots | None = None, windows: Slots | None = None
    ) -> None:
        """Assert that slots with an owner are those in `owned`, once each, beside NO_STATE.

        Args:
            pages: Likewise of pages and windows; None for none.
            windows: Likewise of pages and windows; None for none.
        """
        of_pages = np.zeros(self._pages.size, dtype=np.int64)
        np.add.at(of_pages, [] if pages is None else pages, 1)
        assert np.array_equal(of_pages, self._pages.reshape(-1)), "pages of lists are lost"
        assert np.array_equal(self._pages.any(axis=1), self._is_cut), "a slot without pages is cut"
        counts = self._is_cut.astype(np.int64)
        for slots in owned:
            np.add.at(counts, slots, 1)
        counts[self.spare] += 1
        counts[NO_STATE] = 1
        wrong = np.flatnonzero(counts != self._is_owned)
        assert not len(wrong), f"states {wrong[:8].tolist()} are lost or have several owners"
        assert self.num_free == int((~self._is_owned).sum()), "free slots are miscounted"
        of_windows = np.zeros(self.num_windows, dtype=np.int64)
        np.add.at(of_windows, [] if windows is None else windows - len(self._is_owned), 1)
        assert np.array_equal(of_windows, self._windows), "windows are lost"
        assert self.num_free_windows == int((~self._windows).sum()), "windows are miscounted"
