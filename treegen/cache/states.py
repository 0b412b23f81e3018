"""States of recurrent layers: slots in which the state of one sequence at one position is kept.

Keys and values of a token stay what they are, whatever follows. The state of a recurrent layer does
not: each token changes it. So whoever goes on from a position needs the state at that very
position, which is kept in a slot: a convolution window and a recurrent state for each layer. Each
slot has one owner. Slot 0 is never given out; it stands for no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NO_STATE = 0
"""The slot of a sequence of no tokens."""

Slots = NDArray[np.int64]


class StateCache:
    """Slots with the tensors that they lie in.

    layers: of each recurrent layer its tensors, [num_slots + 1, ...] each.
    num_slots: usable slots.
    num_free: slots without an owner.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]], num_slots: int) -> None:
        """All slots are free; their numbers are 1 to `num_slots`."""
        self.layers = layers
        self.num_slots = self.num_free = num_slots
        self._is_owned = np.zeros(num_slots + 1, dtype=np.bool_)
        self._is_owned[NO_STATE] = True

    def allocate(self, count: int) -> Slots:
        """Take `count` free slots; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} slots wanted, {self.num_free} free"
        slots = np.flatnonzero(~self._is_owned)[:count]
        self._is_owned[slots] = True
        self.num_free -= count
        return slots

    def take(self) -> int:
        """One free slot."""
        return int(self.allocate(1)[0])

    def free(self, slots: Iterable[int]) -> None:
        """Give different slots back; NO_STATE among them is nobody's."""
        owned = np.array([slot for slot in slots if slot != NO_STATE], dtype=np.int64)
        assert self._is_owned[owned].all(), "freed a free slot"
        self._is_owned[owned] = False
        self.num_free += len(owned)

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one slot to another, in all layers."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[target].copy_(tensor[source])

    def reset(self, slots: Slots) -> None:
        """Forget all owners but those of some slots."""
        self._is_owned[:] = False
        self._is_owned[[NO_STATE, *slots]] = True
        self.num_free = int((~self._is_owned).sum())

    def check(self, owned: Iterable[Slots]) -> None:
        """Assert that slots with an owner are those in `owned`, once each, beside NO_STATE."""
        counts = np.zeros(len(self._is_owned), dtype=np.int64)
        for slots in owned:
            np.add.at(counts, slots, 1)
        counts[NO_STATE] = 1
        wrong = np.flatnonzero(counts != self._is_owned)
        assert not len(wrong), f"states {wrong[:8].tolist()} are lost or have several owners"
        assert self.num_free == int((~self._is_owned).sum()), "free slots are miscounted"
