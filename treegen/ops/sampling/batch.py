"""Sampling parameters of the rows of a pass, as tensors.

Shape letters: P distributions, U kinds of biases, K biased tokens, A allowed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.confidence import ConfidenceSignals
from treegen.ops.sampling.logits import column
from treegen.ops.sampling.penalties import Penalties, Words

NO_END = 2**62  # more tokens than any sample has
_MAX_TOP_K = 2**24  # more than any vocabulary has, and exact as a float


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Biases on the logits of K tokens, banned words, and the only tokens that may be drawn."""

    token: NDArray[np.int64]
    """The ids of the tokens."""
    value: NDArray[np.float32]
    """The number added to each token's logit."""
    until: NDArray[np.int64]
    """The value is added as long as the sample has fewer tokens than this."""
    words: Words = ()
    """Words that may not be drawn, each as its tokens."""
    allowed: NDArray[np.int64] | None = None
    """Ids of the only tokens that may be drawn; None allows all."""


@dataclass(frozen=True, slots=True)
class Biases:
    """The biases of P distributions, each of which has one of U kinds."""

    token_UK: Tensor
    """The token ids of each kind's `Bias`, padded with zeros."""
    value_UK: Tensor
    """The values of each kind's `Bias`, padded with zeros."""
    until_UK: Tensor
    """The ends of each kind's `Bias`, padded with zeros."""
    index_P: Tensor
    """The kind of each distribution."""
    allowed_UA: Tensor | None = None
    """Ids of the tokens that may be drawn, padded with one of them; None allows all."""
    limited_U: Tensor | None = None
    """Which kinds allow only the tokens of `allowed_UA`."""

    @staticmethod
    def of(kinds: Sequence[Bias], index_P: Tensor) -> Biases | None:
        """Return the biases of P rows, where row p has kinds[index_P[p]]; None if all are empty."""
        width = max((len(kind.token) for kind in kinds), default=0)
        limited = [kind.allowed is not None for kind in kinds]
        if not width and not any(limited):
            return None

        def column(name: str) -> Tensor:
            arrays = [getattr(kind, name) for kind in kinds]
            rows = [np.pad(array, (0, width - len(array))) for array in arrays]
            return to_device(np.stack(rows), index_P.device)

        columns = column("token"), column("value"), column("until")
        if not any(limited):
            return Biases(*columns, index_P)
        ids = [np.zeros(1, np.int64) if kind.allowed is None else kind.allowed for kind in kinds]
        widest = max(map(len, ids))
        allowed = np.stack([np.pad(row, (0, widest - len(row)), "edge") for row in ids])
        device = index_P.device
        return Biases(
            *columns, index_P, to_device(allowed, device), to_device(np.array(limited), device)
        )

    def add(self, logits_PV: Tensor, steps_P: Tensor) -> Tensor:
        """Return the biased logits [P, V].

        Args:
            logits_PV: Logits [P, V].
            steps_P: Number of tokens of each row's sample so far [P].
        """
        index_P = self.index_P
        holds_PK = steps_P[:, None] < self.until_UK[index_P]
        value_PK = torch.where(holds_PK, self.value_UK[index_P], 0.0)
        logits_PV = logits_PV.scatter_add(1, self.token_UK[index_P], value_PK)
        if self.allowed_UA is None or self.limited_U is None:
            return logits_PV
        banned_UV = torch.ones(
            len(self.allowed_UA), logits_PV.shape[1], dtype=torch.bool, device=logits_PV.device
        ).scatter(1, self.allowed_UA, False)
        banned_UV &= self.limited_U[:, None]
        return logits_PV.masked_fill(banned_UV[index_P], -torch.inf)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of P distributions as tensors [P]; None for unused parameters."""

    temperature_P: Tensor
    greedy_P: Tensor | None
    """Which rows take the most likely token."""
    all_greedy: bool
    """Whether all rows do."""
    top_p_P: Tensor | None
    top_k_P: Tensor | None
    min_p_P: Tensor | None
    num_logprobs: int
    """Number of most likely tokens reported for each draw."""
    biases: Biases | None = None
    """Biases added to the logits before a draw."""
    signals: ConfidenceSignals | None = None
    """Confidence signals reported for each distribution."""
    processed_P: Tensor | None = None
    """Which rows report log-probabilities of the distribution that they draw from."""
    penalties: Penalties | None = None
    """Penalties and bans that depend on the text before a draw."""
    masked: bool = False
    """Whether some rows may draw certain tokens only. `draw` takes the masks."""

    @property
    def draws_in_blocks(self) -> bool:
        """Whether rows draw plainly, from all tokens or from those that a mask allows."""
        filters = (
            self.top_p_P,
            self.top_k_P,
            self.min_p_P,
            self.biases,
            self.processed_P,
            self.penalties,
        )
        return not self.num_logprobs and all(column is None for column in filters)

    @property
    def is_plain(self) -> bool:
        """Whether rows draw plainly and report no confidence signals."""
        return self.signals is None and self.draws_in_blocks and not self.masked

    @staticmethod
    def greedy(num: int, device: torch.device) -> SamplingBatch:
        """Return parameters of rows that take the most likely token, until `load` replaces them."""
        temperature_P = torch.ones(num, device=device)
        return SamplingBatch(temperature_P, temperature_P > 0, False, None, None, None, 0)

    def load(self, other: SamplingBatch) -> None:
        """Overwrite the parameters of the first rows in place, with those of plain draws.

        CUDA graphs read these tensors at fixed addresses.
        """
        assert self.is_plain and other.is_plain and self.greedy_P is not None
        num = len(other.temperature_P)
        self.temperature_P[:num] = other.temperature_P
        self.greedy_P[:num] = False if other.greedy_P is None else other.greedy_P

    @staticmethod
    def of(
        params: Sequence[SamplingParams], index_P: Tensor, biases: Sequence[Bias] = ()
    ) -> SamplingBatch:
        """Return the parameters of P rows.

        Args:
            params: Distinct sampling parameters. Row p has params[index_P[p]].
            index_P: Index into `params` of each row, int64 [P], on the rows' device.
            biases: One bias for each of the parameters. Default: no biases.
        """

        def spread(values: list[float]) -> Tensor:
            return to_device(np.array(values, dtype=np.float32), index_P.device)[index_P]

        temperatures = [p.temperature for p in params]
        processed = [p.reports_processed for p in params]
        top_k = column([min(p.top_k, _MAX_TOP_K) for p in params], 0, index_P)
        return SamplingBatch(
            temperature_P=spread([t or 1.0 for t in temperatures]),
            greedy_P=spread(temperatures) == 0 if 0 in temperatures else None,
            all_greedy=all(t == 0 for t in temperatures),
            top_p_P=column([p.top_p for p in params], 1.0, index_P),
            top_k_P=None if top_k is None else top_k.long(),
            min_p_P=column([p.min_p for p in params], 0.0, index_P),
            num_logprobs=max(p.logprobs for p in params),
            biases=Biases.of(biases, index_P),
            signals=ConfidenceSignals.of(params, index_P),
            processed_P=spread(list(map(float, processed))) > 0 if any(processed) else None,
            penalties=Penalties.of(params, [bias.words for bias in biases], index_P),
        )


_MAX_CACHED: Final = 256  # the cache is cleared when it has more batches


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
        is_same = params[0] is self._params and bias is self._bias
        if not is_same or len(self._by_rows) > _MAX_CACHED:
            self._params, self._bias, self._by_rows = params[0], bias, {}
        batch = self._by_rows.get(len(index))
        if batch is None:
            batch = SamplingBatch.of(params, to_device(index, self._device), biases)
            self._by_rows[len(index)] = batch
        return batch
