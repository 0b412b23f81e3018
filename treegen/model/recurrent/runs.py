"""Shared code of the operators: the runs of a pass, on windows and states in their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from treegen.common.spec import DeltaSpec, StateSpec
from treegen.model.recurrent.state_batch import StateRun, states_of_pass
from treegen.ops.recurrence import DeltaInputs, DeltaStates, scan, step

# T tokens of a pass, C channels, W width of windows, N sequences that run together, L tokens of
# each, H heads, V numbers of a head's output

Rule = Callable[[DeltaInputs, DeltaSpec, Tensor, Tensor | None, StateRun], tuple[Tensor, Tensor]]
"""Computes what N sequences read, [N, L, H, V], and their new states, for many tokens at once.

Its arguments are the layer's inputs and sizes, the convolution's outputs [N, L, C], the states
before (None at the start of texts), and the run.
"""


def has_state_shapes(
    states: Sequence[StateSpec],
    dtype: torch.dtype,
    window: tuple[int, ...],
    state: tuple[int, ...] | None = None,
) -> bool:
    """Return whether a layer keeps exactly a window and a state of these shapes.

    Args:
        states: The states that the layer keeps.
        dtype: The type of the window; the state must be float32.
        window: The shape of the convolution window.
        state: The shape of the recurrent state; None for none.
    """
    wanted = [("conv", window, str(dtype).removeprefix("torch."))]
    if state is not None:
        wanted.append(("recurrent", state, "float32"))
    return [
        (state_spec.kind, state_spec.shape, state_spec.dtype) for state_spec in states
    ] == wanted


def delta_pass(inputs: DeltaInputs, on: DeltaStates, rule: Rule) -> Tensor:
    """Return what the tokens of this pass read from their states, [T, H, V].

    Args:
        inputs: The inputs of the layer.
        on: Its windows and states in their slots.
        rule: Computes runs of several tokens.
    """
    batch = states_of_pass()
    out_THV = inputs.mixed_TC.new_empty(len(inputs.mixed_TC), on.spec.v_heads, on.spec.v_dim)
    if batch.in_order:
        return batch.in_sequences(
            out_THV, lambda sequences: scan(inputs.rows(sequences.rows), on, *sequences[1:])
        )
    if batch.rows is not None:
        return step(inputs, on, batch.rows).contiguous()
    for run in batch.runs:
        rows = inputs.rows(run.rows)
        if (slots := run.one_token) is not None:
            out_THV[run.rows] = step(rows, on, slots)
            continue
        weights_C1W = inputs.conv_CW[:, None]
        out = convolve_run(rows.mixed_TC, weights_C1W, inputs.conv_bias_C, on.windows, run)
        state = None if run.reads_N is None else on.states[run.reads_N]
        out_NLHV, last = rule(rows, on.spec, silu(out), state, run)
        on.states[run.writes_N] = last.to(on.states.dtype)
        out_THV[run.rows] = out_NLHV.flatten(0, 1)
    return out_THV


def convolve_run(
    x_TC: Tensor, conv_C1W: Tensor, bias_C: Tensor | None, windows: Tensor, run: StateRun
) -> Tensor:
    """Return the convolution's outputs for a run's tokens, [N, L, C], and update the windows.

    Args:
        x_TC: The inputs of these N * L tokens.
        conv_C1W: Weights of the convolution [C, 1, columns], at most as many columns as a window
            has.
        bias_C: Bias of the convolution [C]; None for none.
        windows: Windows in state slots [slots, C, W].
        run: The run.
    """
    x_NCL = x_TC.view(run.num, run.length, -1).transpose(1, 2)
    width, seen = windows.shape[-1], conv_C1W.shape[-1]
    if run.reads_N is None:
        before = x_NCL.new_zeros(run.num, x_NCL.shape[1], width)
    else:
        before = windows[run.reads_N]
    extended = torch.cat([before, x_NCL], -1)
    windows[run.writes_N] = extended[..., -width:]
    extended = extended[..., width - seen + 1 :].to(conv_C1W.dtype)
    return conv1d(extended, conv_C1W, bias_C, groups=len(conv_C1W)).transpose(1, 2)
