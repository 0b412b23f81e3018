"""Which recurrent layers run by treegen's own operators, and how.

A layer of transformers takes whole texts or one token of each sequence, and has its states gathered
and put back. An operator takes all tokens of a pass as they are, and reads and writes states in
their slots. The compiler takes it as one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from treegen.common.spec import DeltaSpec, StateSpec
from treegen.model.recurrent import gated_delta, mamba2, short_conv


class Operators(NamedTuple):
    """The operators, as they are or in a form that the compiler does not look into."""

    gated_delta: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]


PLAIN: Final = Operators(gated_delta.gated_delta, mamba2.mamba2, short_conv.short_conv)


def has_operators(
    layers: Sequence[nn.Module], states: Sequence[Sequence[StateSpec]], dtype: torch.dtype
) -> bool:
    """Whether operators are for all recurrent layers of a model.

    Args:
        layers: Its recurrent layers.
        states: What they keep.
    """
    return all(
        short_conv.fits(layer, each, dtype)
        if type(layer).__name__ in short_conv.KNOWN
        else _sizes(layer, each, dtype) is not None
        for layer, each in zip(layers, states, strict=True)
    )


def make_delta_spec(
    layers: Sequence[nn.Module], states: Sequence[Sequence[StateSpec]], dtype: torch.dtype
) -> DeltaSpec | None:
    """How rows list updates of a model's states; None unless all its recurrent layers can."""
    found = {_sizes(layer, each, dtype) for layer, each in zip(layers, states, strict=True)}
    spec = found.pop() if len(found) == 1 else None
    return spec if spec is not None and spec.page_tokens else None


def _sizes(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> DeltaSpec | None:
    name = type(layer).__name__
    if name in gated_delta.KNOWN:
        return gated_delta.sizes(layer, states, dtype)
    return mamba2.sizes(layer, states, dtype) if name in mamba2.KNOWN else None


def forward(
    layer: Any, hidden_1TD: Tensor, tensors: Sequence[Tensor], by: Operators = PLAIN
) -> Tensor:
    """The output [1, T, D] of a layer on its states, which are those after the pass then."""
    name = type(layer).__name__
    if name in gated_delta.KNOWN:
        return gated_delta.forward(layer, hidden_1TD, tensors[0], tensors[1], by.gated_delta)
    if name in mamba2.KNOWN:
        return mamba2.forward(layer, hidden_1TD, tensors[0], tensors[1], by.mamba2)
    return short_conv.forward(layer, hidden_1TD, tensors[0], by.short_conv)
