"""States of recurrent layers: slots in which the state of one sequence at one position is kept.

Keys and values of a token stay what they are, whatever follows. The state of a recurrent layer does
not: each token changes it. So whoever goes on from a position needs the state at that very
position, which is kept in a slot: a convolution window and a recurrent state for each layer. Each
slot has one owner. Slot 0 is never given out; it stands for no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from treegen.cache.pool import PagePool, Pages

NO_STATE = 0
"""The slot of a sequence of no tokens."""


class StateCache:
    """Slots with the tensors that they lie in.

    layers: of each recurrent layer its tensors, [slots, ...] each.
    pool: which slots are free.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]], num_slots: int) -> None:
        """The tensors of `layers` have room for num_slots + 1 slots, with slot 0."""
        self.layers = layers
        self.pool = PagePool(num_slots)

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return self.pool.num_free

    def take(self) -> int:
        """One free slot; the caller has checked that there is one."""
        return int(self.pool.allocate(1)[0])

    def free(self, *slots: int) -> None:
        """Give slots back; slot 0 is nobody's."""
        owned = [slot for slot in slots if slot != NO_STATE]
        if owned:
            self.pool.free(np.array(owned, dtype=np.int32))

    def copy(self, source: int, target: int) -> None:
        """Copy the state in one slot to another, in all layers."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor[target].copy_(tensor[source])

    def check(self, slots: Iterable[Pages]) -> None:
        """Assert that the slots in use are those of `slots`, each owned once."""
        owned = [np.asarray(each, dtype=np.int64) for each in slots]
        owned = [each[each != NO_STATE] for each in owned]
        for each in owned:
            assert (self.pool.num_references(each.astype(np.int32)) == 1).all(), (
                "a state has several owners"
            )
        self.pool.check([each.astype(np.int32) for each in owned])
