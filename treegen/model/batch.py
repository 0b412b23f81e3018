"""What one forward pass of the model needs beside its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treegen.model.recurrent.state_batch import StateBatch
from treegen.ops.attention import PreparedLevels
from treegen.ops.cache.pool import LayerKV

# T tokens of the pass, S rows whose logits are wanted, A axes of positions (1 or 3), I tokens of
# images, D numbers of an embedding


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What stands in the places of images in a pass.

    at_I: int64, the tokens of images.
    rows_ID: in place of their embeddings.
    added: [I, D] each, what is added after each of the first layers (deep-stack).
    """

    at_I: Tensor
    rows_ID: Tensor
    added: tuple[Tensor, ...] = ()

    def on(self, device: torch.device) -> ImageRows:
        """The same on a device."""
        added = tuple(each.to(device) for each in self.added)
        return ImageRows(self.at_I.to(device), self.rows_ID.to(device), added)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one pass, where their keys and values go, and what they attend to.

    tokens_T: int64, token ids.
    positions_T: int64, the position of each token in its own sequence.
    slots_T: int64, where each token's key and value are written: page * page_size + offset.
    logits_at_S: int64, the query rows whose logits are returned, in this order; may be empty.
    levels: which keys each query row sees, prepared once for all layers.
    layers: one page pool for each attention layer of the model.
    states: what becomes of the states of recurrent layers; None for a model without any.
    whole: whether each rank of a tensor-parallel model gets the logits of the whole vocabulary, and
    not those of its part.
    rotary_AT: int64, the position of each token for rotary embeddings; None where that is its own.
    images: what stands in the places of images; None without any.
    windowed: which keys each query row sees in layers with a window; None where that is `levels`.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    logits_at_S: Tensor
    levels: PreparedLevels
    layers: Sequence[LayerKV]
    states: StateBatch | None = None
    whole: bool = True
    rotary_AT: Tensor | None = None
    images: ImageRows | None = None
    windowed: PreparedLevels | None = None

    def levels_of(self, window: int | None) -> PreparedLevels:
        """Which keys each query row sees in a layer. window: that of the layer."""
        return self.levels if window is None or self.windowed is None else self.windowed


class ForwardModel(Protocol):
    """What computes batches: a model, as the scheduler sees it."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Logits [S, V] of the query rows named by batch.logits_at_S."""
        ...
