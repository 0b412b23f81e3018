"""Compute short convolution layers with treegen's own operator, on windows in their slots.

A layer has a window and no other state, so rows have nothing to share and each has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from treegen.common.spec import StateSpec
from treegen.model.recurrent.state_batch import convolve_run, has_state_shapes, states_of_pass
from treegen.ops.recurrence import convolve, convolve_runs

# T tokens of a pass, D width of the model (the number of channels), W width of windows

KNOWN: Final = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})


def fits(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> bool:
    """Return whether the operator supports a layer with these states.

    Args:
        layer: The layer.
        states: The states that it keeps.
        dtype: The type of its window.
    """
    if not all(hasattr(layer, name) for name in ("in_proj", "conv", "out_proj")):
        return False
    width = layer.conv.weight.shape[0], layer.conv.weight.shape[-1]
    return has_state_shapes(states, dtype, width)


def forward(
    layer: Any, hidden_1TD: Tensor, windows: Tensor, operator: Callable[..., Tensor]
) -> Tensor:
    """Return the output [1, T, D] of a layer, and update its windows.

    Args:
        layer: The layer.
        hidden_1TD: Its inputs [1, T, D].
        windows: Windows in state slots [slots, D, W].
        operator: `short_conv`, or its custom operator.
    """
    before, after, x = layer.in_proj(hidden_1TD).chunk(3, -1)
    out_TD = operator((before * x)[0], layer.conv.weight, layer.conv.bias, windows)
    out: Tensor = layer.out_proj(after * out_TD[None])
    return out


def short_conv(x_TD: Tensor, conv_D1W: Tensor, bias_D: Tensor | None, windows: Tensor) -> Tensor:
    """Return the convolution's outputs for the tokens of a pass, [T, D], and update the windows.

    Args:
        x_TD: Inputs [T, D].
        conv_D1W: Weights of the convolution [D, 1, W].
        bias_D: Bias of the convolution [D]; None for none.
        windows: Windows in state slots [slots, D, W].
    """
    batch, weights = states_of_pass(), conv_D1W[:, 0]
    out_TD = torch.empty_like(x_TD)
    if batch.in_order:
        tensors = weights, bias_D, windows
        return batch.in_sequences(
            out_TD, lambda sequences: convolve_runs(x_TD[sequences.rows], *tensors, *sequences[1:])
        )
    if batch.rows is not None:
        slots_2T = batch.rows.inputs_RT
        return convolve(x_TD, weights, bias_D, windows, *slots_2T).to(x_TD.dtype).contiguous()
    for run in batch.runs:
        run_inputs = x_TD[run.rows]
        if (slots := run.one_token) is not None:
            out_TD[run.rows] = convolve(run_inputs, weights, bias_D, windows, *slots.inputs_RT)
        else:
            out_TD[run.rows] = convolve_run(run_inputs, conv_D1W, bias_D, windows, run).flatten(
                0, 1
            )
    return out_TD
