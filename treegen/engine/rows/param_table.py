"""The sampling parameters of a run by index, and the tokens that may end a row of each set."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints
from treegen.engine.param_set import ParamSet

if TYPE_CHECKING:
    from treegen.prompts.stops import StopConditions

_FEW: Final = 256


class ParamTable(list[ParamSet]):
    """Sampling parameters by index; equal ones have one index.

    A long run gets ever more of them, for example a new seed with each request. Once there are
    many, unused parameters lose their index, which is then reused.
    """

    def __init__(self, first: ParamSet) -> None:
        """Set up a table of the first parameters, whose index is always 0."""
        super().__init__([first])
        self._index = {first.params.drawing: 0}
        self._free: list[int] = []
        self._most = _FEW
        # The tokens that may end a row, for each StopConditions, and the index of each set's.
        self._stoppings: dict[StopConditions, int] = {first.stopping: 0}
        self._may_end: NDArray[np.bool_] = first.stopping.may_end[None]
        self._stopping_of = np.zeros(1, dtype=np.int64)

    def may_end(self, params: Ints, tokens: Ints) -> NDArray[np.bool_]:
        """Return whether a row may be over after a token; `params` has each row's index."""
        found: NDArray[np.bool_] = self._may_end[self._stopping_of[params], tokens]
        return found

    def add(self, each: ParamSet, in_use: Callable[[], Collection[int]]) -> int:
        """Return the index of parameters; add them if they are new.

        Args:
            each: The parameters.
            in_use: Returns the indices in use.
        """
        key = each.params.drawing
        if key in self._index:
            return self._index[key]
        if len(self._index) >= self._most:
            self._drop_all_but({0, *in_use()})
        if self._free:
            index = self._free.pop()
            self[index] = each
        else:
            index = len(self)
            self.append(each)
            self._stopping_of = np.append(self._stopping_of, 0)
        if each.stopping not in self._stoppings:
            self._stoppings[each.stopping] = len(self._stoppings)
            self._may_end = np.concatenate([self._may_end, each.stopping.may_end[None]])
        self._stopping_of[index] = self._stoppings[each.stopping]
        self._index[key] = index
        return index

    def _drop_all_but(self, needed: Collection[int]) -> None:
        self._index = {key: index for key, index in self._index.items() if index in needed}
        self._free = [index for index in range(len(self)) if index not in needed]
        self._most = max(2 * len(self._index), _FEW)
        for index in self._free:
            self[index] = self[0]
            self._stopping_of[index] = 0
        places, self._stopping_of = np.unique(self._stopping_of, return_inverse=True)
        self._may_end = self._may_end[places]
        by_place = {place: stopping for stopping, place in self._stoppings.items()}
        self._stoppings = {by_place[old]: new for new, old in enumerate(places.tolist())}
