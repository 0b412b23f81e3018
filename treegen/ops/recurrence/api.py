"""One step of a recurrence or a convolution, or the end of lists, by what the device has."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from treegen.ops.recurrence import reference
from treegen.ops.recurrence.types import DeltaInputs, DeltaStates, RowSlots


def step(given: DeltaInputs, on: DeltaStates, rows: RowSlots) -> Tensor:
    """What each row reads from its state after its token, [T, H, V].

    Windows and states, or lists, are those after the token then.
    """
    if not _has_kernels(on.states):
        return reference.step(given, on, rows)
    from treegen.ops.recurrence import gpu

    return gpu.step(given, on, rows)


def fold_update_lists(
    on: DeltaStates, base_F: Tensor, target_F: Tensor, listed_F: Tensor, pages_PF: Tensor
) -> None:
    """Make F states of lists: what the first `listed_F` updates make of the states in `base_F`.

    Args:
        target_F: Slots for them, which may be those in `base_F`.
        pages_PF: Pages of each list.
    """
    if not _has_kernels(on.states):
        return reference.fold(on, base_F, target_F, listed_F, pages_PF)
    from treegen.ops.recurrence import gpu

    return gpu.fold(on, base_F, target_F, listed_F, pages_PF)


def convolve(
    mixed_TC: Tensor, conv_CW: Tensor, bias_C: Tensor | None, windows: Tensor, rows: RowSlots
) -> Tensor:
    """The convolution at each row's token, [T, C]; windows have that token afterwards.

    Args:
        rows: With states of their own. Others as in `DeltaInputs` and `DeltaStates`.
    """
    reads_T, writes_T = rows.inputs_RT
    if not _has_kernels(windows):
        out_TC = reference.convolve(mixed_TC, conv_CW, bias_C, windows, reads_T, writes_T)
        return out_TC.to(mixed_TC.dtype)
    from treegen.ops.recurrence import gpu

    return gpu.convolve(mixed_TC, conv_CW, bias_C, windows, reads_T, writes_T)


def scan(
    given: DeltaInputs, on: DeltaStates, reads_N: Tensor, writes_N: Tensor, num_tokens: int
) -> Tensor:
    """What N sequences read from their states after each of so many tokens, [T, H, V].

    Sums of a token have one order: it has the same bits alone as after others. Windows and states
    are those after the last token then.

    Args:
        given: Of the tokens of the first sequence, then of the next.
        reads_N: Slots of the states before and after; -1 is read at the start of a text.
        writes_N: Slots of the states before and after; -1 is read at the start of a text.
    """
    if not _has_kernels(on.states):
        return reference.scan(given, on, reads_N, writes_N, num_tokens)
    from treegen.ops.recurrence import gpu

    return gpu.scan(given, on, reads_N, writes_N, num_tokens)


def convolve_runs(
    mixed_TC: Tensor,
    conv_CW: Tensor,
    bias_C: Tensor | None,
    windows: Tensor,
    reads_N: Tensor,
    writes_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """The convolution at so many tokens of each sequence, [T, C], as in `scan`."""
    if not _has_kernels(windows):
        return reference.convolve_runs(
            mixed_TC, conv_CW, bias_C, windows, reads_N, writes_N, num_tokens
        )
    from treegen.ops.recurrence import gpu

    return gpu.convolve_runs(mixed_TC, conv_CW, bias_C, windows, reads_N, writes_N, num_tokens)


def _has_kernels(states: Tensor) -> bool:
    return states.is_cuda and find_spec("triton") is not None
