"""Sampling parameters with their biases and stop conditions, and the table of those of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from treegen.common.params import SamplingParams
from treegen.ops.sampling.batch import NO_END, Bias
from treegen.prompts.stops import StopConditions

_Ints = NDArray[np.int64]
_MIN_CAPACITY: Final = 256  # unused parameter sets keep their index while a run has fewer sets


@dataclass(frozen=True)
class ParamSet:
    """Sampling parameters that several requests share, and their stop conditions."""

    params: SamplingParams
    stopping: StopConditions

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0

    @functools.cached_property
    def bias(self) -> Bias:
        """Biases and bans: from min_tokens, logit_bias, bad_words and allowed_token_ids."""
        min_tokens = self.params.min_tokens
        stops = [
            (token, -math.inf, min_tokens) for token in sorted(self.stopping.ids) if min_tokens
        ]
        biases = [(token, value, NO_END) for token, value in self.params.biases]
        token, value, until = zip(*stops, *biases, strict=True) if stops or biases else ((), (), ())
        allowed = self.params.allowed_token_ids
        return Bias(
            np.array(token, np.int64),
            np.array(value, np.float32),
            np.array(until, np.int64),
            self.stopping.bad_words,
            None if allowed is None else np.array(allowed, np.int64),
        )


def param_sets(
    params: Sequence[SamplingParams],
    make_stop_conditions: Callable[[SamplingParams], StopConditions],
) -> tuple[list[ParamSet], list[int]]:
    """Return the distinct parameter sets of requests, and the index of each request's set.

    Args:
        params: Sampling parameters of each request. Without requests, one default set is returned.
        make_stop_conditions: Returns the stop conditions of sampling parameters.
    """
    # Rows with equal parameters are drawn and ended together.
    sets = {p.sampling_key: p for p in params or [SamplingParams()]}
    index_of = {drawing: index for index, drawing in enumerate(sets)}
    distinct = [ParamSet(p, make_stop_conditions(p)) for p in sets.values()]
    return distinct, [index_of[p.sampling_key] for p in params]


class ParamTable(list[ParamSet]):
    """Sampling parameters by index; equal ones have one index.

    A long run gets ever more of them, for example a new seed with each request. Once there are
    many, unused parameters lose their index, which is then reused.
    """

    def __init__(self, first: ParamSet) -> None:
        """Set up a table of the first parameters, whose index is always 0."""
        super().__init__([first])
        self._index = {first.params.sampling_key: 0}
        self._free: list[int] = []
        self._capacity = _MIN_CAPACITY
        # The tokens that may end a row, for each StopConditions, and the index of each set's.
        self._stoppings: dict[StopConditions, int] = {first.stopping: 0}
        self._may_end: NDArray[np.bool_] = first.stopping.may_end[None]
        self._stop_index = np.zeros(1, dtype=np.int64)

    def may_end(self, params: _Ints, tokens: _Ints) -> NDArray[np.bool_]:
        """Return whether a row may end after a token; `params` has each row's index."""
        may_end: NDArray[np.bool_] = self._may_end[self._stop_index[params], tokens]
        return may_end

    def add(self, param_set: ParamSet, in_use: Callable[[], Collection[int]]) -> int:
        """Return the index of parameters; add them if they are new.

        Args:
            param_set: The parameters.
            in_use: Returns the indices in use.
        """
        key = param_set.params.sampling_key
        if key in self._index:
            return self._index[key]
        if len(self._index) >= self._capacity:
            self._drop_all_but({0, *in_use()})
        if self._free:
            index = self._free.pop()
            self[index] = param_set
        else:
            index = len(self)
            self.append(param_set)
            self._stop_index = np.append(self._stop_index, 0)
        if param_set.stopping not in self._stoppings:
            self._stoppings[param_set.stopping] = len(self._stoppings)
            self._may_end = np.concatenate([self._may_end, param_set.stopping.may_end[None]])
        self._stop_index[index] = self._stoppings[param_set.stopping]
        self._index[key] = index
        return index

    def _drop_all_but(self, needed: Collection[int]) -> None:
        self._index = {key: index for key, index in self._index.items() if index in needed}
        self._free = [index for index in range(len(self)) if index not in needed]
        self._capacity = max(2 * len(self._index), _MIN_CAPACITY)
        for index in self._free:
            self[index] = self[0]
            self._stop_index[index] = 0
        used, self._stop_index = np.unique(self._stop_index, return_inverse=True)
        self._may_end = self._may_end[used]
        old_stoppings = {index: stopping for stopping, index in self._stoppings.items()}
        self._stoppings = {old_stoppings[old]: new for new, old in enumerate(used.tolist())}
