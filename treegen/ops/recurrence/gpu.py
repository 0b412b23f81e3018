"""Launches of the Triton kernels of recurrent layers.

Legend: T rows, H value heads, V value dim, C channels, W width of a window, N sequences, F update
lists, P pages of a list.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from treegen.common.spec import DeltaSpec
from treegen.ops.recurrence import kernels
from treegen.ops.recurrence.types import (
    BASE,
    LISTED,
    NEXT_WINDOW,
    PAGES,
    READ_SLOTS,
    WINDOW,
    WRITE_SLOTS,
    Convolution,
    DeltaInputs,
    DeltaStates,
    RowSlots,
    offsets,
    page_offsets,
)

_CHANNELS: Final = 512  # channels per program
_STEP_CHANNELS: Final = 256  # the same where each row has one token
_ROWS: Final = 16  # rows per program that reads shared states
_BASE_VALUES: Final = 128  # columns of a shared state per program; _VALUES in float32
_KEYS: Final = 128  # largest k_dim at which a program computes all these columns
_VALUES: Final = 64  # columns of a state per program that computes matrix products
_OWN_VALUES: Final = 32  # columns of a state per program that updates a row's own state
_UPDATES_FOLDED: Final = 32  # updates folded at once
_UPDATES_READ: Final = 4  # updates read at once, by one warp, so that no warp waits for another
_MAX_ACCUMULATORS: Final = 2048  # accumulators of a program that reads lists


def step(layer: DeltaInputs, cache: DeltaStates, rows: RowSlots) -> Tensor:
    """Compute one token of each row; see `treegen.ops.recurrence.reference.step`.

    Args:
        layer: The layer's inputs for T rows, and its weights.
        cache: Windows and states of the layer.
        rows: Where each row's window and its state or update list are.

    Returns:
        The output of each row [T, H, V], in the type of `mixed_TC`.
    """
    spec, inputs, num_rows = cache.spec, rows.inputs_RT, rows.num_rows
    columns = (WINDOW, NEXT_WINDOW) if rows.has_lists else (READ_SLOTS, WRITE_SLOTS)
    at = inputs[columns[0]], inputs[columns[1]]
    mixed_TC = convolve(layer.mixed_TC, layer.convolution(cache), *at, activates=True)
    if not rows.has_lists:
        return _step_states(layer, cache, mixed_TC, inputs[READ_SLOTS], inputs[WRITE_SLOTS], 1)
    # In float32, one product is three products of TF32 numbers, which need more registers.
    is_float32 = mixed_TC.dtype == torch.float32
    block_k, block_v = _blocks(cache, _VALUES if is_float32 else _BASE_VALUES)
    parts = triton.cdiv(spec.v_dim, block_v)
    scale, heads = _scale(cache), _heads(cache)
    out = mixed_TC.new_empty(num_rows, spec.v_heads, spec.v_dim)
    base_reads_2THV = out.new_empty(2, *out.shape, dtype=torch.float32)
    kernels.read_bases[spec.v_heads, triton.cdiv(num_rows, _ROWS), parts](
        mixed_TC,
        cache.states,
        inputs[BASE],
        base_reads_2THV,
        num_rows,
        scale,
        **heads,
        BLOCK_T=_ROWS,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PRECISION=_precision(mixed_TC.dtype),
        num_warps=8 if is_float32 else 4,
    )
    block_h = _heads_at_once(spec)
    kernels.read_lists[spec.v_heads // block_h, num_rows](
        mixed_TC,
        *_gates(layer),
        base_reads_2THV,
        cache.states,
        cache.states.view(cache.dtype),
        inputs[BASE],
        inputs[LISTED],
        inputs[PAGES:],
        out,
        num_rows,
        scale,
        layer.strength,
        **heads,
        **_get_page_arguments(cache),
        BLOCK_H=block_h,
        BLOCK_N=_UPDATES_READ,
        BLOCK_K=block_k,
        BLOCK_V=_next_power_of_2(spec.v_dim),
        num_warps=1,
    )
    return out


def scan(
    layer: DeltaInputs,
    cache: DeltaStates,
    read_slots_N: Tensor,
    write_slots_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """Compute several tokens of each sequence [T, H, V]; see `reference.scan`.

    Args:
        layer: Inputs of all tokens of the first sequence, then of the next; and the weights.
        cache: Windows and states of the layer.
        read_slots_N: Slot of each sequence's state before its first token [N]; -1 for none.
        write_slots_N: Slot for each sequence's state after its last token [N].
        num_tokens: Tokens per sequence.
    """
    runs = read_slots_N, write_slots_N, num_tokens
    mixed_TC = convolve_runs(layer.mixed_TC, layer.convolution(cache), *runs, activates=True)
    return _step_states(layer, cache, mixed_TC, *runs)


def _step_states(
    layer: DeltaInputs,
    cache: DeltaStates,
    mixed_TC: Tensor,
    read_slots_N: Tensor,
    write_slots_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """Compute several tokens of each sequence that has a state of its own [T, H, V]."""
    spec, (block_k, block_v) = cache.spec, _blocks(cache)
    out = mixed_TC.new_empty(len(mixed_TC), spec.v_heads, spec.v_dim)
    block_v = min(block_v, _OWN_VALUES)
    kernels.step_states[spec.v_heads, len(read_slots_N), triton.cdiv(spec.v_dim, block_v)](
        mixed_TC,
        *_gates(layer),
        cache.states,
        read_slots_N,
        write_slots_N,
        out,
        num_tokens,
        _scale(cache),
        layer.strength,
        **_heads(cache),
        BLOCK_K=block_k,
        BLOCK_V=block_v,
    )
    return out


def _gates(layer: DeltaInputs) -> tuple[Any, ...]:
    """Return the kernel arguments from which gates and strengths are computed."""
    skip_H = layer.a_log_H if layer.skip_H is None else layer.skip_H
    a_TH, b_TH = layer.a_TH, layer.b_TH
    return a_TH, a_TH.stride(0), b_TH, b_TH.stride(0), layer.a_log_H, layer.dt_bias_H, skip_H


def _heads(cache: DeltaStates) -> dict[str, Any]:
    """Return the kernel arguments that describe the heads."""
    spec = cache.spec
    return {
        "G": spec.k_heads,
        "H": spec.v_heads,
        "K": spec.k_dim,
        "V": spec.v_dim,
        **dict(zip(("Q_AT", "K_AT", "V_AT"), offsets(spec), strict=True)),
        "CORRECTS": spec.corrects,
    }


def _scale(cache: DeltaStates) -> float:
    return float(cache.spec.k_dim**-0.5) if cache.spec.corrects else 1.0


def convolve_runs(
    mixed_TC: Tensor,
    conv: Convolution,
    read_slots_N: Tensor,
    write_slots_N: Tensor,
    num_tokens: int,
    *,
    activates: bool = False,
) -> Tensor:
    """Compute the convolution at several tokens of each sequence [T, C], and update windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C]; each row is dense.
        conv: The convolution.
        read_slots_N: Slot of each sequence's window before its first token [N]; -1 for none.
        write_slots_N: Slot for each sequence's window after its last token [N].
        num_tokens: Tokens per sequence.
        activates: Whether SiLU is applied to the result.
    """
    conv_CW, bias_C, windows = conv
    (num_rows, channels), width = mixed_TC.shape, windows.shape[-1]
    out_TC = torch.empty_like(mixed_TC, memory_format=torch.contiguous_format)
    parts = triton.cdiv(channels, _CHANNELS)
    kernels.convolve_runs[parts, num_rows](
        mixed_TC,
        mixed_TC.stride(0),
        windows,
        read_slots_N,
        conv_CW.contiguous(),
        conv_CW if bias_C is None else bias_C,
        out_TC,
        num_tokens,
        channels,
        W=width,
        SEEN=conv_CW.shape[-1],
        BLOCK=_CHANNELS,
        HAS_BIAS=bias_C is not None,
        ACTIVATES=activates,
    )
    kernels.move_windows[parts, len(read_slots_N)](
        mixed_TC,
        mixed_TC.stride(0),
        windows,
        read_slots_N,
        write_slots_N,
        num_tokens,
        channels,
        W=width,
        BLOCK=_CHANNELS,
    )
    return out_TC


def convolve(
    mixed_TC: Tensor,
    conv: Convolution,
    read_slots_T: Tensor,
    write_slots_T: Tensor,
    *,
    activates: bool = False,
) -> Tensor:
    """Compute the convolution at the new tokens [T, C], and append them to the windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C]; each row is dense.
        conv: The convolution.
        read_slots_T: Slot of each row's window before the token [T].
        write_slots_T: Slot for each row's window after the token [T].
        activates: Whether SiLU is applied to the result.
    """
    conv_CW, bias_C, windows = conv
    num_rows, channels = mixed_TC.shape
    out_TC = torch.empty_like(mixed_TC, memory_format=torch.contiguous_format)
    width, itemsize = windows.shape[-1], windows.itemsize
    is_packed = width * itemsize == torch.int64.itemsize and itemsize == 2
    packed_windows = windows.view(torch.int64) if is_packed else windows
    kernels.convolve[triton.cdiv(channels, _STEP_CHANNELS), num_rows](
        mixed_TC,
        mixed_TC.stride(0),
        windows,
        packed_windows,
        read_slots_T,
        write_slots_T,
        conv_CW.contiguous(),
        conv_CW if bias_C is None else bias_C,
        out_TC,
        channels,
        W=width,
        SEEN=conv_CW.shape[-1],
        BLOCK=_STEP_CHANNELS,
        WHOLE=is_packed,
        HAS_BIAS=bias_C is not None,
        ACTIVATES=activates,
    )
    return out_TC


def fold_update_lists(
    cache: DeltaStates, base_F: Tensor, target_F: Tensor, listed_F: Tensor, pages_PF: Tensor
) -> None:
    """Fold update lists into states; see `reference.fold_update_lists`.

    Args:
        cache: Windows and states of the layer.
        base_F: Slots of the states to which the lists apply [F].
        target_F: Slots for the resulting states [F], which may equal `base_F`.
        listed_F: Number of updates in each list [F].
        pages_PF: Pages of each list [P, F].
    """
    spec, num_rows = cache.spec, len(base_F)
    block_k, block_v = _blocks(cache)
    kernels.fold_lists[spec.v_heads, num_rows, triton.cdiv(spec.v_dim, block_v)](
        cache.states,
        cache.states,
        cache.states.view(cache.dtype),
        base_F,
        target_F,
        listed_F,
        pages_PF.contiguous(),
        num_rows,
        G=spec.k_heads,
        H=spec.v_heads,
        K=spec.k_dim,
        V=spec.v_dim,
        **_get_page_arguments(cache),
        BLOCK_N=_UPDATES_FOLDED,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PRECISION=_precision(cache.dtype),
        num_warps=8,
    )


def _blocks(cache: DeltaStates, values: int = _VALUES) -> tuple[int, int]:
    """Return rows and columns of a state per program; it holds a block of that size at once.

    Args:
        cache: Windows and states of the layer.
        values: Columns of a state with at most _KEYS rows. Default: 64.
    """
    keys = _next_power_of_2(cache.spec.k_dim)
    return keys, min(_next_power_of_2(cache.spec.v_dim), values * _KEYS // max(keys, _KEYS))


def _heads_at_once(spec: DeltaSpec) -> int:
    """Return how many heads of one key head a program reads lists for, a power of two."""
    heads, max_heads = 1, _MAX_ACCUMULATORS // (_UPDATES_READ * _next_power_of_2(spec.v_dim))
    while 2 * heads <= max_heads and spec.v_heads // spec.k_heads % (2 * heads) == 0:
        heads *= 2
    return heads


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products whose factors were converted from a type.

    One TF32 product rounds less than 16-bit types do.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _get_page_arguments(cache: DeltaStates) -> dict[str, Any]:
    """Return the kernel arguments that describe the pages of update lists."""
    spec = cache.spec
    keys, values = page_offsets(spec)
    size = spec.state_bytes // (spec.pages * spec.k_heads)
    return {
        "N": spec.page_tokens,
        "PAGE": size,
        "KEYS": keys,
        "VALUES": values,
        "SIZE": spec.itemsize,
    }


def _next_power_of_2(size: int) -> int:
    """Return the next power of two, at least 16, the smallest size of a matrix product."""
    return max(1 << (size - 1).bit_length(), 16)
