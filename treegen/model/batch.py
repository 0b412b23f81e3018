"""The inputs of one forward pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treegen.common.lifetimes import use_context_value
from treegen.model.recurrent.state_batch import StateBatch
from treegen.ops.attention import PreparedLevels
from treegen.ops.cache.pool import LayerKV

# T tokens of the pass, S rows whose logits are returned, A axes of positions (1 or 3), I tokens of
# images, D width of an embedding, V vocabulary


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The embeddings of images in a pass."""

    indices_I: Tensor
    """int64 [I], the indices of image tokens among the tokens of the pass."""
    rows_ID: Tensor
    """[I, D], the embeddings of these tokens."""
    added: tuple[Tensor, ...] = ()
    """[I, D] each, the numbers to add after each of the first layers (deep-stack)."""

    def on(self, device: torch.device) -> ImageRows:
        """Return a copy on a device."""
        added = tuple(tensor.to(device) for tensor in self.added)
        return ImageRows(self.indices_I.to(device), self.rows_ID.to(device), added)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one pass, their cache slots and their attention levels."""

    tokens_T: Tensor
    """int64, token ids."""
    positions_T: Tensor
    """int64, the position of each token in its own sequence."""
    slots_T: Tensor
    """int64, the cache slot of each token's key and value: page * page_size + offset."""
    logits_at_S: Tensor
    """int64, the query rows whose logits are returned, in this order; may be empty."""
    levels: PreparedLevels
    """The keys that each query row sees, prepared once for all layers."""
    layers: Sequence[LayerKV]
    """One page pool for each attention layer of the model."""
    states: StateBatch | None = None
    """The state slots that recurrent layers read and write; None for a model without such
    layers."""
    gathers_logits: bool = True
    """Whether each rank of a tensor-parallel model gets the logits of the whole vocabulary, not
    only those of its shard."""
    rotary_AT: Tensor | None = None
    """int64, the position of each token for rotary embeddings; None if equal to `positions_T`."""
    images: ImageRows | None = None
    """The embeddings of images; None without images."""
    windowed: PreparedLevels | None = None
    """The keys that each query row sees in layers with a window; None if equal to `levels`."""

    def levels_of(self, window: int | None) -> PreparedLevels:
        """Return the levels that a layer with this window (None for no window) attends to."""
        return self.levels if window is None or self.windowed is None else self.windowed


_current: ContextVar[Batch] = ContextVar("treegen_batch")


def use_batch(batch: Batch) -> AbstractContextManager[None]:
    """While open, indexers and compiled layers use this batch."""
    return use_context_value(_current, batch)


def current_batch() -> Batch:
    """Return the batch of the pass."""
    return _current.get()


class ForwardModel(Protocol):
    """A model as the scheduler sees it: it computes batches."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [S, V] of the query rows `batch.logits_at_S`."""
