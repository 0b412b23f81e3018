"""The operators of recurrent layers, in a form that the compiler does not look into.

The states of the pass reach them around the traced code.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from treegen.model.recurrent.own_layers import PLAIN, Operators

# T tokens, C channels, H heads, V numbers of a head's output


@torch.library.custom_op("treegen::gated_delta", mutates_args=("windows", "states"))
def _gated_delta(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    conv_C1W: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    windows: Tensor,
    states: Tensor,
    k_heads: int,
    strength: float,
) -> Tensor:
    return PLAIN.gated_delta(
        mixed_TC, b_TH, a_TH, conv_C1W, a_log_H, dt_bias_H, windows, states, k_heads, strength
    ).contiguous()


@_gated_delta.register_fake
def _(
    mixed_TC: Tensor, b_TH: Tensor, a_TH: Tensor, conv_C1W: Tensor, a_log_H: Tensor,
    dt_bias_H: Tensor, windows: Tensor, states: Tensor, *options: Any,
) -> Tensor:  # fmt: skip
    return mixed_TC.new_empty(mixed_TC.shape[0], states.shape[1], states.shape[3])


@torch.library.custom_op("treegen::mamba2", mutates_args=("windows", "states"))
def _mamba2(
    mixed_TC: Tensor,
    dt_TH: Tensor,
    conv_C1W: Tensor,
    conv_bias_C: Tensor | None,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    skip_H: Tensor,
    windows: Tensor,
    states: Tensor,
    groups: int,
    least: float,
    most: float,
) -> Tensor:
    return PLAIN.mamba2(
        mixed_TC, dt_TH, conv_C1W, conv_bias_C, a_log_H, dt_bias_H, skip_H, windows, states, groups,
        least, most,
    ).contiguous()  # fmt: skip


@_mamba2.register_fake
def _(
    mixed_TC: Tensor, dt_TH: Tensor, conv_C1W: Tensor, conv_bias_C: Tensor | None, a_log_H: Tensor,
    dt_bias_H: Tensor, skip_H: Tensor, windows: Tensor, states: Tensor, *options: Any,
) -> Tensor:  # fmt: skip
    return mixed_TC.new_empty(mixed_TC.shape[0], states.shape[1], states.shape[2])


@torch.library.custom_op("treegen::short_conv", mutates_args=("windows",))
def _short_conv(x_TC: Tensor, conv_C1W: Tensor, bias_C: Tensor | None, windows: Tensor) -> Tensor:
    return PLAIN.short_conv(x_TC, conv_C1W, bias_C, windows).contiguous()


@_short_conv.register_fake
def _(x_TC: Tensor, conv_C1W: Tensor, bias_C: Tensor | None, windows: Tensor) -> Tensor:
    return x_TC.new_empty(x_TC.shape)


OPERATORS: Final = Operators(
    torch.ops.treegen.gated_delta, torch.ops.treegen.mamba2, torch.ops.treegen.short_conv
)
