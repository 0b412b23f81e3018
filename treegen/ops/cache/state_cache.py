"""State slots, each of which stores the recurrent state of one sequence at one position.

Keys and values of a token never change, but each token changes the state of a recurrent layer. So a
sequence that continues from a position needs the state at exactly that position. A slot stores it:
a convolution window and a recurrent state for each layer. Each slot has one owner. Slot 0 is never
allocated; it means "no state".

Rows of some models keep update lists instead of states, see `treegen.ops.recurrence`. A slot can be
cut into pages for such lists. The windows of rows are then in additional slots after the others,
which store nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.spec import DeltaSpec

NO_STATE = 0
"""The slot of a sequence without tokens."""

Slots = NDArray[np.int64]


class StateCache:
    """State slots with the tensors that store them.

    Attributes:
        layers: The tensors of each recurrent layer, [num_slots + 1, ...] each. With update lists,
            all have a spare slot, and the first of them, the windows, one more slot per row.
        num_slots: Usable slots.
        num_free: Slots without an owner.
        delta: The sizes of layers with update lists; None if all rows have states of their own.
        spare: A slot that is never allocated, for a state that is being moved.
        num_windows: Windows of rows.
        num_free_windows: Windows without an owner.
    """

    def __init__(
        self, layers: Sequence[Sequence[Tensor]], num_slots: int, delta: DeltaSpec | None = None
    ) -> None:
        """Create a cache of free slots with the numbers 1 to `num_slots`.

        Args:
            layers: The tensors of each recurrent layer; see the class.
            num_slots: Usable slots.
            delta: Sizes of layers with update lists; None if no row has lists.
        """
        self.layers = layers
        self.num_slots = self.num_free = num_slots
        self.delta = delta
        self._is_owned = np.zeros(num_slots + 1 + (delta is not None), dtype=np.bool_)
        self.spare = NO_STATE if delta is None else num_slots + 1
        self._is_owned[[NO_STATE, self.spare]] = True
        # Which pages of cut slots have an owner. Slots that are not cut have no owned pages.
        self._is_cut = np.zeros(len(self._is_owned), dtype=np.bool_)
        self._pages = np.zeros((len(self._is_owned), delta.pages if delta else 1), dtype=np.bool_)
        self.num_windows = len(layers[0][0]) - len(self._is_owned) if delta is not None else 0
        self.num_free_windows = self.num_windows
        self._windows = np.zeros(self.num_windows, dtype=np.bool_)

    def allocate(self, count: int) -> Slots:
        """Allocate `count` free slots; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} slots wanted, {self.num_free} free"
        slots = np.flatnonzero(~self._is_owned)[:count]
        self._is_owned[slots] = True
        self.num_free -= count
        return slots

    def allocate_one(self) -> int:
        """Allocate one free slot."""
        return int(self.allocate(1)[0])

    def free(self, slots: Iterable[int]) -> None:
        """Free distinct slots, ignoring NO_STATE."""
        owned = np.array([slot for slot in slots if slot != NO_STATE], dtype=np.int64)
        assert self._is_owned[owned].all(), "freed a free slot"
        self._is_owned[owned] = False
        self.num_free += len(owned)

    @property
    def num_cut_pages(self) -> int:
        """The number of free pages in cut slots."""
        return int((~self._pages[self._is_cut]).sum())

    def allocate_pages(self, count: int) -> Slots:
        """Allocate `count` pages, cutting slots if needed; the caller has checked for free slots.

        Page p of slot s has the number s * delta.pages + p.
        """
        per_slot = self._pages.shape[1]
        num_missing = count - self.num_cut_pages
        if num_missing > 0:
            self._is_cut[self.allocate(-(-num_missing // per_slot))] = True
        pages = np.flatnonzero(self._is_cut[:, None] & ~self._pages)[:count]
        self._pages.reshape(-1)[pages] = True
        return pages

    def free_pages(self, pages: Slots) -> None:
        """Free distinct pages, and the slots in which no page has an owner any more."""
        assert self._pages.reshape(-1)[pages].all(), "freed a free page"
        self._pages.reshape(-1)[pages] = False
        slots = np.unique(pages // self._pages.shape[1])
        empty = slots[~self._pages[slots].any(axis=1)]
        self._is_cut[empty] = False
        self.free(empty.tolist())

    def allocate_windows(self, count: int) -> Slots:
        """Allocate `count` windows; the caller has checked `num_free_windows`."""
        assert count <= self.num_free_windows, f"{count} windows wanted"
        windows = np.flatnonzero(~self._windows)[:count]
        self._windows[windows] = True
        self.num_free_windows -= count
        return windows + len(self._is_owned)

    def free_windows(self, windows: Slots) -> None:
        """Free distinct windows."""
        assert self._windows[windows - len(self._is_owned)].all(), "freed a free window"
        self._windows[windows - len(self._is_owned)] = False
        self.num_free_windows += len(windows)

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one slot to another, in all layers."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[target].copy_(tensor[source])

    def reset(self, slots: Slots) -> None:
        """Drop all owners except those of some slots; pages and windows become free."""
        self._is_owned[:] = False
        self._is_owned[[NO_STATE, self.spare, *slots]] = True
        self._is_cut[:], self._pages[:], self._windows[:] = False, False, False
        self.num_free = int((~self._is_owned).sum())
        self.num_free_windows = self.num_windows

    def check(
        self, owned: Iterable[Slots], pages: Slots | None = None, windows: Slots | None = None
    ) -> None:
        """Assert that exactly the given slots, pages and windows have an owner, once each.

        Args:
            owned: Slots with an owner; NO_STATE may occur any number of times.
            pages: Pages of update lists with an owner; None for none.
            windows: Windows of rows with an owner; None for none.
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
