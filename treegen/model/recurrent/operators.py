"""Select the recurrent layers that treegen's own operators compute, and run them.

A transformers layer takes whole texts or one token per sequence, and its states must be gathered
and scattered. An operator takes all tokens of a pass, and reads and writes states in their slots.
The compiler treats it as opaque; custom operators get the states of the pass from a context
variable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from treegen.common.spec import DeltaSpec, StateSpec
from treegen.model.recurrent import gated_delta, mamba2
from treegen.model.recurrent.state_batch import convolve_run, has_state_shapes, states_of_pass
from treegen.ops.cache.pool import resolve_proxy
from treegen.ops.recurrence import Convolution, convolve, convolve_runs

# T tokens of a pass, D width of the model, C channels, W width of windows

# Their layers have a window and no other state, so rows have nothing to share.
_SHORT_CONVS: Final = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})


def _fits_short_conv(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> bool:
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


def _forward_short_conv(
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
    batch, conv = states_of_pass(), Convolution(conv_D1W[:, 0], bias_D, windows)
    out_TD = torch.empty_like(x_TD)
    if batch.in_order:
        return batch.in_sequences(
            out_TD, lambda run: convolve_runs(x_TD[run.rows], conv, *run.sequences)
        )
    if batch.rows is not None:
        return convolve(x_TD, conv, *batch.rows.inputs_RT).to(x_TD.dtype).contiguous()
    for run in batch.runs:
        run_inputs = x_TD[run.rows]
        if (slots := run.one_token) is not None:
            out_TD[run.rows] = convolve(run_inputs, conv, *slots.inputs_RT)
        else:
            out_TD[run.rows] = convolve_run(run_inputs, conv, run).flatten(0, 1)
    return out_TD


class Operators(NamedTuple):
    """The operators, as plain functions or as custom operators for compiled layers."""

    gated_delta: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]


PLAIN: Final = Operators(gated_delta.gated_delta, mamba2.mamba2, short_conv)


def has_operators(
    layers: Sequence[nn.Module], states: Sequence[Sequence[StateSpec]], dtype: torch.dtype
) -> bool:
    """Return whether operators support all recurrent layers of a model.

    Args:
        layers: Its recurrent layers.
        states: The states that each of them keeps.
        dtype: The type of convolution windows.
    """
    return all(
        _fits_short_conv(layer, layer_states, dtype)
        if type(layer).__name__ in _SHORT_CONVS
        else _make_spec(layer, layer_states, dtype) is not None
        for layer, layer_states in zip(layers, states, strict=True)
    )


def make_delta_spec(
    layers: Sequence[nn.Module], states: Sequence[Sequence[StateSpec]], dtype: torch.dtype
) -> DeltaSpec | None:
    """Return the layout of rows' update lists; None unless all recurrent layers support lists.

    Args:
        layers: The recurrent layers of a model.
        states: The states that each of them keeps.
        dtype: The type of convolution windows.
    """
    layouts = {
        _make_spec(layer, layer_states, dtype)
        for layer, layer_states in zip(layers, states, strict=True)
    }
    spec = layouts.pop() if len(layouts) == 1 else None
    return spec if spec is not None and spec.page_tokens else None


def _make_spec(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> DeltaSpec | None:
    name = type(layer).__name__
    if name in gated_delta.KNOWN:
        return gated_delta.make_spec(layer, states, dtype)
    return mamba2.make_spec(layer, states, dtype) if name in mamba2.KNOWN else None


def forward(
    layer: Any, hidden_1TD: Tensor, tensors: Sequence[Tensor], by: Operators = PLAIN
) -> Tensor:
    """Return the output [1, T, D] of a layer, and update its states.

    Args:
        layer: The layer.
        hidden_1TD: Its inputs [1, T, D].
        tensors: Its convolution windows, and its states if it has any, in state slots.
        by: The operators to use.
    """
    name = type(layer).__name__
    if name in gated_delta.KNOWN:
        return gated_delta.forward(layer, hidden_1TD, tensors[0], tensors[1], by.gated_delta)
    if name in mamba2.KNOWN:
        return mamba2.forward(layer, hidden_1TD, tensors[0], tensors[1], by.mamba2)
    return _forward_short_conv(layer, hidden_1TD, tensors[0], by.short_conv)


def _opaque(
    plain: Callable[..., Tensor], changes: tuple[str, ...], shape: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return an operator that the compiler treats as opaque.

    Args:
        plain: The operator's implementation.
        changes: Names of the arguments that it writes into. It is called with proxies for these.
        shape: Returns an output without values. It is called with the first argument and the
            proxies, in the order of their names.
    """
    name = plain.__name__
    indices = [list(inspect.signature(plain).parameters).index(argument) for argument in changes]

    @functools.wraps(plain)
    def run_resolved(*arguments: Any) -> Tensor:
        resolved = list(arguments)
        for index in indices:
            resolved[index] = resolve_proxy(resolved[index])
        return plain(*resolved)

    def make_empty(*arguments: Any) -> Tensor:
        return shape(arguments[0], *(arguments[index] for index in indices))

    # The compiler does not see the tensors that it writes into, so it mutates no argument.
    custom_op = torch.library.custom_op(f"treegen::{name}", run_resolved, mutates_args=())
    custom_op.register_fake(make_empty)
    operator: Callable[..., Tensor] = getattr(torch.ops.treegen, name)
    return operator


OPERATORS: Final = Operators(
    _opaque(
        PLAIN.gated_delta,
        ("windows", "states"),
        lambda x_TC, _, state_HKV: x_TC.new_empty(x_TC.shape[0], *state_HKV.shape[::2]),
    ),
    _opaque(
        PLAIN.mamba2,
        ("windows", "states"),
        lambda x_TC, _, state_HVK: x_TC.new_empty(x_TC.shape[0], *state_HVK.shape[:2]),
    ),
    _opaque(PLAIN.short_conv, ("windows",), lambda x_TC, _: x_TC.new_empty(x_TC.shape)),
)
