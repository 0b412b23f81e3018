"""Recurrences, convolutions and folds of update lists, with Triton kernels where available."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import Tensor

from treegen.ops.recurrence import reference
from treegen.ops.recurrence.types import DeltaInputs, DeltaStates, RowSlots


def step(layer: DeltaInputs, on: DeltaStates, rows: RowSlots) -> Tensor:
    """Compute one token of each row. Windows and states (or update lists) are updated in place.

    Args:
        layer: The layer's inputs for T rows, and its weights.
        on: Windows and states of the layer.
        rows: Where each row's window and its state or update list are.

    Returns:
        What each row reads from its state after the token [T, H, V], in the type of `mixed_TC`.
    """
    out_THV: Tensor = _operators(on.states).step(layer, on, rows)
    return out_THV


def fold_update_lists(
    on: DeltaStates, base_F: Tensor, target_F: Tensor, listed_F: Tensor, pages_PF: Tensor
) -> None:
    """Fold F update lists into states.

    Args:
        on: Windows and states of the layer.
        base_F: Slots of the states to which the lists apply [F].
        target_F: Slots for the resulting states [F], which may equal `base_F`.
        listed_F: Number of updates in each list [F].
        pages_PF: Pages of each list [P, F].
    """
    _operators(on.states).fold_update_lists(on, base_F, target_F, listed_F, pages_PF)


def convolve(
    mixed_TC: Tensor, conv_CW: Tensor, bias_C: Tensor | None, windows: Tensor, rows: RowSlots
) -> Tensor:
    """Compute the convolution at each row's token [T, C], and append the token to the windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C].
        conv_CW: Weights, with one column for each token that the convolution sees.
        bias_C: Bias [C]; None for none.
        windows: Last inputs of each slot [slots, C, W], updated in place.
        rows: Slots of T rows that have states of their own.
    """
    reads_T, writes_T = rows.inputs_RT
    operators = _operators(windows)
    out_TC: Tensor = operators.convolve(mixed_TC, conv_CW, bias_C, windows, reads_T, writes_T)
    return out_TC.to(mixed_TC.dtype)


def scan(
    layer: DeltaInputs, on: DeltaStates, reads_N: Tensor, writes_N: Tensor, num_tokens: int
) -> Tensor:
    """Compute `num_tokens` tokens of each of N sequences, one token after another.

    The order of each token's sums is fixed, so a token has the same bits whether it is computed
    alone or after others. Windows and states are updated in place.

    Args:
        layer: Inputs of all tokens of the first sequence, then of the next; and the weights.
        on: Windows and states of the layer.
        reads_N: Slot of each sequence's state before its first token [N]; -1 at the start of a
            text.
        writes_N: Slot for each sequence's state after its last token [N].
        num_tokens: Tokens per sequence.

    Returns:
        What each sequence reads from its state after each token [T, H, V], T = N * num_tokens.
    """
    out_THV: Tensor = _operators(on.states).scan(layer, on, reads_N, writes_N, num_tokens)
    return out_THV


def convolve_runs(
    mixed_TC: Tensor,
    conv_CW: Tensor,
    bias_C: Tensor | None,
    windows: Tensor,
    reads_N: Tensor,
    writes_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """Compute the convolution at `num_tokens` tokens of each sequence [T, C], and update windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C]: all tokens of the first sequence, then of the
            next.
        conv_CW: Weights, with one column for each token that the convolution sees.
        bias_C: Bias [C]; None for none.
        windows: Last inputs of each slot [slots, C, W], updated in place.
        reads_N: Slot of each sequence's window before its first token [N]; -1 at the start of a
            text.
        writes_N: Slot for each sequence's window after its last token [N].
        num_tokens: Tokens per sequence.
    """
    arguments = mixed_TC, conv_CW, bias_C, windows, reads_N, writes_N, num_tokens
    out_TC: Tensor = _operators(windows).convolve_runs(*arguments)
    return out_TC


def _operators(states: Tensor) -> Any:
    """Return the module with Triton kernels if it can run on the states; else the reference."""
    if states.is_cuda and find_spec("triton") is not None:
        from treegen.ops.recurrence import gpu

        return gpu
    return reference
