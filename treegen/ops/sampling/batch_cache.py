"""A cache of sampling batches for rows that all have the same parameters, which is frequent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.batch import Bias, SamplingBatch

_MOST: Final = 256  # the cache is cleared when it has more batches


class SamplingBatchCache:
    """Makes each `SamplingBatch` once per number of rows, if all rows have the same parameters."""

    def __init__(self, device: torch.device) -> None:
        """Create an empty cache.

        Args:
            device: Where the batches are.
        """
        self._device = device
        # The latest parameters, and their batches by number of rows. Parameters are compared by
        # identity, so the cache keeps references to them.
        self._params: SamplingParams | None = None
        self._bias: Bias | None = None
        self._by_rows: dict[int, SamplingBatch] = {}

    def of(
        self, params: Sequence[SamplingParams], biases: Sequence[Bias], index: NDArray[Any]
    ) -> SamplingBatch:
        """Return the batch of rows; row r has params[index[r]] and biases[index[r]].

        Args:
            params: Distinct sampling parameters.
            biases: One bias for each of the parameters, or empty.
            index: Index into `params` of each row.

        Returns:
            The batch, which may be cached and must not be changed.
        """
        if len(params) > 1:
            return SamplingBatch.of(params, to_device(index, self._device), biases)
        bias = biases[0] if biases else None
        if params[0] is not self._params or bias is not self._bias or len(self._by_rows) > _MOST:
            self._params, self._bias, self._by_rows = params[0], bias, {}
        batch = self._by_rows.get(len(index))
        if batch is None:
            batch = SamplingBatch.of(params, to_device(index, self._device), biases)
            self._by_rows[len(index)] = batch
        return batch
