"""Layers of short convolutions by treegen's own operator, on windows in their slots.

A layer has a window and no other state. So rows have nothing to share, and each has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from treegen.common.spec import StateSpec
from treegen.model.recurrent.runs import convolve_run, has_state_shapes
from treegen.model.recurrent.state_batch import states_of_pass
from treegen.ops.recurrence import convolve, convolve_runs

# T tokens of a pass, D width of the model, which is the number of channels

KNOWN: Final = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})


def fits(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> bool:
    """Whether the operator is for a layer with such states."""
    if not all(hasattr(layer, name) for name in ("in_proj", "conv", "out_proj")):
        return False
    width = layer.conv.weight.shape[0], layer.conv.weight.shape[-1]
    return has_state_shapes(states, dtype, width)


def forward(
    layer: Any, hidden_1TD: Tensor, windows: Tensor, operator: Callable[..., Tensor]
) -> Tensor:
    """The output [1, T, D] of a layer on its windows, which are those after the pass then.

    Args:
        operator: `short_conv`, or a form of it that the compiler does not look into.
    """
    before, after, x = layer.in_proj(hidden_1TD).chunk(3, -1)
    out_TD = operator((before * x)[0], layer.conv.weight, layer.conv.bias, windows)
    out: Tensor = layer.out_proj(after * out_TD[None])
    return out


def short_conv(x_TD: Tensor, conv_D1W: Tensor, bias_D: Tensor | None, windows: Tensor) -> Tensor:
    """The convolution at the tokens of a pass, [T, D]."""
    batch, weights = states_of_pass(), conv_D1W[:, 0]
    out_TD = torch.empty_like(x_TD)
    if batch.in_order:
        given = weights, bias_D, windows
        return batch.in_sequences(
            out_TD, lambda each: convolve_runs(x_TD[each.rows], *given, *each[1:])
        )
    if batch.rows is not None:
        return convolve(x_TD, weights, bias_D, windows, batch.rows).contiguous()
    for run in batch.runs:
        mine = x_TD[run.rows]
        if (slots := run.one_token) is not None:
            out_TD[run.rows] = convolve(mine, weights, bias_D, windows, slots)
        else:
            out_TD[run.rows] = convolve_run(mine, conv_D1W, bias_D, windows, run).flatten(0, 1)
    return out_TD
