"""How rows are drawn, remembered: rows that are all drawn alike come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.batch import Bias, SamplingBatch

_MOST: Final = 256  # numbers of rows that are remembered


class SamplingBatchCache:
    """Makes `SamplingBatch`es, once for each number of rows that are all drawn alike."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is remembered. device: where the batches are."""
        self._device = device
        # What rows are drawn by, and their batches by number of rows. The parameters are known by
        # their addresses, so they are kept.
        self._params: SamplingParams | None = None
        self._bias: Bias | None = None
        self._by_rows: dict[int, SamplingBatch] = {}

    def of(
        self, params: Sequence[SamplingParams], biases: Sequence[Bias], index: NDArray[Any]
    ) -> SamplingBatch:
        """Row r is drawn by params[index[r]] and biases[index[r]]. The result is not to be changed.

        Args:
            biases: None, or one of each of the parameters.
        """
        if len(params) > 1:
            return SamplingBatch.of(params, to_device(index, self._device), biases)
        bias = biases[0] if biases else None
        if params[0] is not self._params or bias is not self._bias or len(self._by_rows) > _MOST:
            self._params, self._bias, self._by_rows = params[0], bias, {}
        found = self._by_rows.get(len(index))
        if found is None:
            found = SamplingBatch.of(params, to_device(index, self._device), biases)
            self._by_rows[len(index)] = found
        return found
