"""The attention operator, which checks its arguments and calls an implementation.

Legend: T query rows, H query heads, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from treegen.common.checks import as_tuple
from treegen.errors import InputError, arg
from treegen.ops.attention.level import HostLevel, Level, check_layout, check_values, to_host
from treegen.ops.attention.registry import check_reads_fp8, choose
from treegen.ops.attention.types import (
    FP8,
    AttentionOptions,
    Implementation,
    KVPair,
    KVPairs,
    PreparedLevels,
    Window,
)

Pools = Tensor | Sequence[Tensor]
"""Keys or values: one pool for all levels, or one pool per level."""
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def prepare(
    levels: Sequence[Level], positions_T: Tensor | None = None, impl: str = "auto"
) -> PreparedLevels:
    """Prepare levels for `attend`, once for all layers of a pass.

    Args:
        levels: The levels, at least one, with all tensors on one device.
        positions_T: Position of each query row, int64 or int32 [T]. Required if a level is causal
            or a layer has a window.
        impl: Name of an implementation. "auto" takes the first one that runs on the device.

    Returns:
        The prepared levels, which serve every layer of the pass.

    Raises:
        InputError: the levels or positions violate the rules of `Level`, or the implementation does
            not run on their device.
    """
    levels = as_tuple("levels", levels)
    if not levels:
        raise InputError("attention needs at least one level, got none")
    if not isinstance(levels[0], Level):
        raise InputError(f"levels[0] must be a Level, got {type(levels[0]).__name__}")
    device = levels[0].q_start_G.device
    for index, level in enumerate(levels):
        check_layout(level, index, device)
        if level.causal and positions_T is None:
            raise InputError(f"level {index} is causal and requires positions_T, got None")
    if positions_T is not None and (
        positions_T.dim() != 1
        or positions_T.dtype not in (torch.int32, torch.int64)
        or positions_T.device != device
    ):
        raise InputError(
            f"positions_T must have the shape [T] and the type int64 or int32 on {device}, got "
            f"{positions_T.dtype} {tuple(positions_T.shape)} on {positions_T.device}"
        )
    host = [to_host(level) for level in levels]
    for index, host_level in enumerate(host):
        check_values(host_level, index)
        if positions_T is not None:
            _check_rows(host_level, index, positions_T.shape[0])
    return prepare_host(host, positions_T, device, impl, checked=True)


def prepare_host(
    levels: Sequence[HostLevel],
    positions_T: Tensor | None,
    device: torch.device,
    impl: str | Implementation = "auto",
    *,
    checked: bool = False,
    expands: bool = False,
) -> PreparedLevels:
    """Prepare levels on the host for `attend`, without waiting for the device.

    Args:
        levels: Valid levels; this function does not check them.
        positions_T: Position of each query row, int64 or int32 [T]; None if no level is causal and
            no layer has a window.
        device: Where the tensors of the layers are.
        impl: An implementation or its name. "auto" takes the first one that runs on the device.
        checked: Whether `attend` checks each layer's tensors against the levels.
        expands: Whether rows may attend to latents through keys and values that are expanded
            during the pass.

    Raises:
        InputError: the implementation does not run on the device.
    """
    if device.type == "cuda" and device.index is None:  # tensors report a device with its index
        device = torch.device("cuda", torch.cuda.current_device())
    implementation = choose(impl, device) if isinstance(impl, str) else impl
    copied = [level for level in levels if level.copied]
    if copied and len(copied) < len(levels):
        stored = [level for level in levels if not level.copied]
        copies = prepare_host(copied, positions_T, device, implementation)
        prepared = prepare_host(stored, positions_T, device, implementation, expands=expands)
        return replace(prepared, copies=copies)
    return PreparedLevels(
        levels=tuple(levels),
        positions_T=positions_T,
        device=device,
        impl=implementation.name,
        implementation=implementation,
        state=implementation.prepare(levels, positions_T, device),
        checked=checked,
        expands=expands,
    )


class AttendOptions(TypedDict, total=False):
    """The options of `attend`; its docstring explains them."""

    scale: float | None
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None
    impl: str


@overload
def attend(
    q_THD: Tensor,
    keys: Pools,
    values: Pools,
    levels: Sequence[Level] | PreparedLevels,
    positions_T: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttendOptions],
) -> Tensor: ...
@overload
def attend(
    q_THD: Tensor,
    keys: Pools,
    values: Pools,
    levels: Sequence[Level] | PreparedLevels,
    positions_T: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttendOptions],
) -> tuple[Tensor, Tensor]: ...
def attend(  # noqa: PLR0913 -- users name these arguments of the operator
    q_THD: Tensor,
    keys: Pools,
    values: Pools,
    levels: Sequence[Level] | PreparedLevels,
    positions_T: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    impl: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend each query row to the keys of its groups, over all levels, in one softmax.

    A row sees the keys of its groups. On a causal level it sees only keys at or before its own
    position. With a window W it sees, on any level, only keys less than W positions before it; with
    chunks of C positions, no keys before its own chunk, which starts at the last multiple of C.
    Slots past a group's kv_len and pages outside all groups never affect the result, whatever they
    hold; "flash4" requires finite numbers there.

    Args:
        q_THD: Queries [T, q_heads, k_dim]. q_heads is a multiple of kv_heads: query head h reads
            key head h // (q_heads // kv_heads).
        keys: [num_pages, page_size, kv_heads, k_dim], one pool for all levels or a sequence with
            one pool per level.
        values: [num_pages, page_size, kv_heads, v_dim], likewise. Keys and values have the type of
            q, or both are in FP8 (e4m3) and are read without a scale.
        levels: Levels, which are checked here, or the result of `prepare`, which is faster.
        positions_T: As in `prepare`; None if `levels` are prepared.
        scale: Factor of the logits. Default: k_dim ** -0.5.
        window: W, at least 1. Default: no window.
        chunk: C, at least 1, in place of a window. Default: no chunks.
        softcap: Positive bound C; scaled logits become C * tanh(logit / C). Default: no bound.
        sinks: One more logit in the denominator of each head [q_heads]. Default: no sinks.
        impl: As in `prepare`; "auto" or the prepared implementation if `levels` are prepared.
        return_lse: Whether to return the LSE too.

    Returns:
        Results [T, q_heads, v_dim] in the type of q. With return_lse also the natural logarithm of
        the softmax denominator, sink included: [T, q_heads] in float32 (float64 for float64). A row
        that sees no key has the result 0, and the LSE -inf or the logit of its sink.

    Raises:
        InputError: arguments do not fit each other, or the implementation does not support them.
    """
    if isinstance(levels, PreparedLevels):
        prepared = levels
        if positions_T is not None or impl not in ("auto", prepared.impl):
            raise InputError(
                f"attend() does not accept positions_T or {arg('impl', impl)} for levels that "
                f"were prepared for {prepared.impl!r}; pass both arguments to prepare()"
            )
    else:
        prepared = prepare(levels, positions_T, impl)
    num_levels = len(prepared.levels)
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        pairs: list[KVPair] = [(keys, values)] * num_levels
    elif isinstance(keys, Tensor) or isinstance(values, Tensor):
        raise InputError(
            "keys and values must both be a single tensor, or both be a list with one "
            "tensor for each level"
        )
    elif len(keys) != num_levels or len(values) != num_levels:
        raise InputError(
            f"keys and values must have {num_levels} tensors, one for each level, got "
            f"{len(keys)} and {len(values)}"
        )
    else:
        pairs = list(zip(keys, values, strict=True))
    # Most layers of a model have the same shapes, so each set of shapes is checked once.
    signature = (q_THD.shape, q_THD.dtype, q_THD.device, *((k.shape, k.dtype) for k, _ in pairs))
    signature += tuple((v.shape, v.dtype) for _, v in pairs)
    if signature not in prepared.seen:
        _check_tensors(q_THD, pairs, prepared)
        prepared.seen.add(signature)
    layer_window, q_heads = _window(prepared, window, chunk), q_THD.shape[1]
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap must be positive, got {softcap}")
    if sinks is not None and sinks.shape != (q_heads,):
        raise InputError(f"sinks must have shape ({q_heads},), got {tuple(sinks.shape)}")
    options = AttentionOptions(
        scale=q_THD.shape[-1] ** -0.5 if scale is None else scale,
        window=layer_window,
        softcap=softcap,
        sinks_H=sinks,
    )
    out_THV, lse_TH = prepared.implementation.attend(q_THD, pairs, prepared, options)
    return (out_THV, lse_TH) if return_lse else out_THV


def _window(prepared: PreparedLevels, window: int | None, chunk: int | None) -> Window | None:
    """Return the window that a layer's options name, or None."""
    if window is not None and chunk is not None:
        raise InputError(
            f"window and chunk cannot be used together, got window {window} and chunk "
            f"{chunk}; pass only one of them"
        )
    for name, size in (("window", window), ("chunk", chunk)):
        if size is None:
            continue
        if size < 1:
            raise InputError(f"{name} must be at least 1 (the row's own token), got {size}")
        if prepared.positions_T is None:
            raise InputError(f"{name} {size} requires positions_T, got None")
        return Window(size, is_chunk=name == "chunk")
    return None


def _check_rows(level: HostLevel, index: int, num_rows: int) -> None:
    if level.stop_G.size and level.stop_G.max() > num_rows:
        raise InputError(
            f"level {index} has rows up to {level.stop_G.max()}, but there are only {num_rows} "
            "query rows; pass one query row for each row of the level"
        )


def _check_tensors(q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels) -> None:
    """Check the tensors of a layer against each other and against the levels."""
    if q_THD.dim() != 3 or q_THD.dtype not in FLOATS:
        raise InputError(
            "q_THD must have the shape [rows, q_heads, k_dim] and a floating-point type of 16, "
            f"32 or 64 bits, got {tuple(q_THD.shape)} {q_THD.dtype}"
        )
    num_rows, q_heads, k_dim = q_THD.shape
    if prepared.positions_T is not None and prepared.positions_T.shape[0] != num_rows:
        raise InputError(
            f"there are {prepared.positions_T.shape[0]} positions but {num_rows} query rows; "
            "pass one position for each row"
        )
    device = prepared.device
    for index, (keys, values) in enumerate(pairs):
        if keys.dim() != 4 or keys.shape[-1] != k_dim or not keys.shape[1]:
            raise InputError(
                f"keys of level {index} must have the shape [pages, page_size, kv_heads, "
                f"{k_dim}], got {tuple(keys.shape)}"
            )
        if values.dim() != 4 or values.shape[:3] != keys.shape[:3] or not values.shape[3]:
            raise InputError(
                f"values of level {index} must have the shape "
                f"[{', '.join(map(str, keys.shape[:3]))}, v_dim], got {tuple(values.shape)}"
            )
        if values.shape[3] != pairs[0][1].shape[3]:
            raise InputError(
                f"all levels must have the same v_dim, got {values.shape[3]} in level {index} "
                f"and {pairs[0][1].shape[3]} in level 0"
            )
        if not keys.shape[2] or q_heads % keys.shape[2]:
            raise InputError(
                "the number of query heads must be a multiple of the number of key heads, got "
                f"{q_heads} and {keys.shape[2]}; repeat or remove heads"
            )
        if keys.dtype == FP8:
            check_reads_fp8(prepared.impl)
        stored = FP8 if keys.dtype == FP8 else q_THD.dtype
        for name, tensor, dtype in (
            ("q_THD", q_THD, q_THD.dtype),
            ("keys", keys, stored),
            ("values", values, stored),
        ):
            if tensor.dtype != dtype or tensor.device != device:
                raise InputError(
                    f"{name} (level {index}) must be {dtype} on {device}, got "
                    f"{tensor.dtype} on {tensor.device}"
                )
        if prepared.checked:
            _check_rows(prepared.levels[index], index, num_rows)
            prepared.levels[index].check_pool(index, keys.shape[0], keys.shape[1])
