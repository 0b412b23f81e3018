"""Draws as arrays on the host, and their asynchronous copies from the device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegen.common.device import AsyncHostCopy
from treegen.ops.sampling.draw import Draws


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Draws as arrays, named as in `Draws`; None for arrays that are not reported.

    After `flat` all arrays have one entry per draw.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    lse: NDArray[np.float32]
    top_tokens: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None
    signals: NDArray[np.float32] | None

    def flat(self) -> HostDraws:
        """Return arrays with one entry per draw, repeating the values of each distribution."""
        num_draws = self.tokens.shape[1]
        arrays: list[Any] = [self.lse, self.top_tokens, self.top_logprobs, self.signals]
        if num_draws > 1:
            arrays = [None if a is None else np.repeat(a, num_draws, axis=0) for a in arrays]
        return HostDraws(self.tokens.ravel(), self.logprobs.ravel(), *arrays)

    def at(self, draws: NDArray[np.int64]) -> HostDraws:
        """Return some of the draws, by index."""
        arrays = (getattr(self, name) for name in _NAMES)
        chosen: list[Any] = [None if array is None else array[draws] for array in arrays]
        return HostDraws(*chosen)


_NAMES = tuple(field.name for field in fields(HostDraws))


class AsyncDraws:
    """Draws whose copies to the host are queued."""

    def __init__(self, draws: Draws) -> None:
        """Queue the copies behind the device's current work."""
        tensors = [getattr(draws, field.name) for field in fields(draws)]
        self._fetch = AsyncHostCopy([tensor for tensor in tensors if tensor is not None])
        self._is_there = [tensor is not None for tensor in tensors]

    def wait(self) -> HostDraws:
        """Wait for the copies, and return the draws."""
        copied = iter(self._fetch.wait())
        arrays: list[Any] = [next(copied) if there else None for there in self._is_there]
        return HostDraws(*arrays)
