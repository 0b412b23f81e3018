"""Attention over levels on a GPU: a Triton kernel over work lists, and torch's dense kernel.

Each level but the last stores partial results in float32 (in the queries' type if latents are
streamed). If the last level's groups are single rows and there are few parts, its launch merges
them too. Otherwise a separate kernel merges them.

In batch-invariant attention, the bits of a row depend on the row's own keys alone. They do not
depend on other rows of the batch, on how keys are shared, or on when they are computed; see
`fold_kernels`. Each level is one launch, in order, and the last one writes the result.

Legend: T query rows, H query heads, D key dimension, V value dimension, P parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial

import torch
import triton
from torch import Tensor

from treegen.common.device import use_device
from treegen.errors import InputError
from treegen.ops.attention.gpu.dense import attend_dense, can_attend_dense
from treegen.ops.attention.gpu.fold_kernels import fold_units, merge_sums
from treegen.ops.attention.gpu.kernels import attend_units, merge_parts
from treegen.ops.attention.gpu.launch import LayerCall, width_of
from treegen.ops.attention.gpu.state import TritonState, count_processors
from treegen.ops.attention.gpu.tuning import (
    choose_tuning,
    find_max_height,
    fold_tuning,
    has_few_tuning,
    is_wide,
    latent_tuning,
    shared_memory,
)
from treegen.ops.attention.gpu.work_units import HEIGHTS, WorkShape, are_few
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.types import NEEDS_AMPERE, AttentionOptions, KVPairs, PreparedLevels

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Triton:
    """One Triton kernel for all levels, except for a trunk that the dense kernel can read.

    Tensors are 16-bit or float32.
    """

    name = "triton"
    in_graphs = True
    invariant = False
    """Whether keys are folded in one order, so that neither dense nor latent kernels are used."""
    streams = False
    """Whether a Gluon kernel reads latents where it can."""

    def refusal(self, device: torch.device) -> str | None:
        """Return None for a CUDA device since Ampere, and the reason for refusal otherwise.

        Triton's interpreter runs on any device.
        """
        if _INTERPRETED:
            return None
        if device.type != "cuda":
            return f"requires CUDA tensors, got {device}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return NEEDS_AMPERE
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> TritonState:
        """Store the levels; work lists need the head count, which the first layer has.

        Args:
            levels: The levels, on the host.
            positions_T: Not used; `attend` reads the positions of the prepared levels.
            device: Where the tensors of the layers are.
        """
        return TritonState(tuple(levels), device, invariant=self.invariant)

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Compute partial results of all levels and merge them, both in float32.

        Results are rounded once, after the merge; those of the dense kernel also before.

        Args:
            q_THD: Queries [T, H, D].
            pairs: Keys and values of each level, which must be the same pool for all levels.
            prepared: The levels.
            options: Softmax options of the layer.

        Returns:
            Results [T, H, V] in the type of q, and LSE [T, H] in float32.

        Raises:
            InputError: levels have different pools, or the tensors are float64.
        """
        keys, values = pairs[0]
        if any(pair[0] is not keys or pair[1] is not values for pair in pairs):
            raise InputError(
                f"impl {self.name!r} requires the same keys and values for all levels; use "
                "'reference'"
            )
        if q_THD.dtype == torch.float64:
            raise InputError(f"impl {self.name!r} does not support float64; use 'reference'")
        # The kernels need a dense last dimension.
        q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        (num_rows, q_heads, _), v_dim = q_THD.shape, values.shape[3]
        out_THV = q_THD.new_empty(num_rows, q_heads, v_dim)
        lse_TH = q_THD.new_empty(num_rows, q_heads, dtype=torch.float32)
        if num_rows == 0:
            return out_THV, lse_TH
        state: TritonState = prepared.state
        is_latent = not self.invariant and _reads_latents(keys, values)
        if is_latent:  # repeat the key head, so that no head has more query rows than a unit
            split = -1, -1, _head_groups(q_heads), -1
            keys, values = keys.expand(split), values.expand(split)
        streamed = (
            self.streams and is_latent and _can_stream(q_THD, keys, values, prepared, options)
        )
        if streamed:
            q_THD = q_THD.contiguous()
        work = state.work(self.shape_of(q_THD, keys, values, options, is_latent, streamed))
        at = prepared.positions_T, options, work, out_THV, lse_TH, is_latent, streamed
        with use_device(q_THD.device):
            self.fill(LayerCall(q_THD, keys, values, *at))
        return out_THV, lse_TH

    def shape_of(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        is_latent: bool = False,
        streamed: bool = False,
    ) -> WorkShape:
        """Return the layer properties on which its work lists depend.

        Args:
            q_THD: Queries [T, H, D].
            keys: Keys of the pool.
            values: Values of the pool.
            options: Softmax options of the layer.
            is_latent: Whether values are the first numbers of keys.
            streamed: Whether latents are read as a stream.
        """
        num_rows, q_heads = q_THD.shape[:2]
        width, memory = width_of(q_THD, values, is_latent), shared_memory(q_THD.device)
        highest = HEIGHTS[2] if is_latent else find_max_height(width, q_THD.dtype, memory)
        return WorkShape(
            num_rows,
            keys.shape[2],
            q_heads // keys.shape[2],
            keys.shape[1],
            not self.invariant and can_attend_dense(q_THD, keys, values, options),
            highest,
            HEIGHTS[2] if is_latent else HEIGHTS[1],
            streamed,
            not is_latent and has_few_tuning(width, q_THD.dtype),
            is_wide(width),
        )

    def fill(self, call: LayerCall) -> None:
        """Fill the results and LSE of a layer that has rows."""
        work, q_THD = call.work, call.q_THD
        (num_rows, q_heads, _), v_dim = q_THD.shape, call.values.shape[3]
        num_parts, dense_rows, num_chunks, fold = work.host.num_parts, 0, 0, 1
        # A stream rounds its parts as cuDNN does, and writes them as it writes results.
        dtype = q_THD.dtype if call.streamed else torch.float32
        parts = q_THD.new_empty(num_parts, num_rows, q_heads, v_dim, dtype=dtype)
        lses = q_THD.new_empty(num_parts, num_rows, q_heads, dtype=torch.float32)
        if not work.host.complete:
            lses.fill_(-torch.inf)
        dense, dense_lses = call.out_THV, call.lse_TH  # placeholders that no kernel reads
        if work.dense is not None:
            dense, dense_lses = attend_dense(
                q_THD, call.keys, call.values, work.dense, call.options.scale
            )
            num_chunks, dense_rows, fold = dense.shape[:3]
        arrays = parts, lses, dense, dense_lses, call.sinks, call.out_THV, call.lse_TH
        counts = num_rows, dense_rows, num_chunks
        has_sinks = call.options.sinks_H is not None
        for kind, units, used in zip(work.host.kinds, work.units, work.host.units, strict=True):
            if len(units):
                merging = {"FOLD": 1, "HAS_SINKS": False, "LAST": False}
                _launch(call, units, len(used), kind, arrays, counts, **merging)
        if len(work.last):
            merging = {"FOLD": fold, "HAS_SINKS": has_sinks, "LAST": True}
            _launch(call, work.last, len(work.last), work.host.last_kind, arrays, counts, **merging)
            return
        call.launch_merge(merge_parts, arrays, *counts, num_parts, FOLD=fold)


def _launch(
    call: LayerCall,
    units: Tensor,
    num_units: int,
    kind: int,
    arrays: tuple[Tensor, ...],
    counts: tuple[int, ...],
    **merging: int,
) -> None:
    """Launch the units of one height once.

    Args:
        call: The layer's call.
        units: The units, with spare capacity.
        num_units: How many of them are used.
        kind: The index of their height in HEIGHTS.
        arrays: What the kernel reads and writes besides queries, keys and values.
        counts: Rows, rows of the dense part, and its chunks.
        **merging: FOLD, HAS_SINKS and LAST of the kernel.
    """
    if call.streamed:
        from treegen.ops.attention.gpu.stream_kernels import launch_stream

        parts, lses, _, _, _, out, out_lses = arrays
        into = (out, out_lses) if merging["LAST"] else (parts, lses)
        launch_stream(call, units, *into, max(HEIGHTS[kind] // call.per_head, 1))
        return
    height = max(HEIGHTS[kind], HEIGHTS[1]) if call.is_latent else HEIGHTS[kind]
    if height > 1:
        height = max(height, triton.next_power_of_2(call.per_head))
    # Keys that would keep a processor busy are split, so programs of the last launch are short.
    fill = not merging["LAST"] and is_wide(width_of(call.q_THD, call.values, call.is_latent))
    processors = count_processors(call.keys.device)
    few = are_few(num_units * call.keys.shape[2], kind, processors, fill_processors=fill)
    call.launch_units(
        attend_units,
        units,
        height,
        arrays,
        counts,
        latent_tuning if call.is_latent else partial(choose_tuning, few=few),
        LATENT=call.is_latent,
        **merging,
    )


def _reads_latents(keys: Tensor, values: Tensor) -> bool:
    """Return whether there is one key head, whose first numbers are the values."""
    same = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    return same and keys.shape[2] == 1 and values.shape[3] < keys.shape[3]


def _can_stream(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    prepared: PreparedLevels,
    options: AttentionOptions,
) -> bool:
    """Return whether the stream of latents supports a layer's tensors and options."""
    sizes = q_THD.shape[2], values.shape[3], keys.shape[1]
    per_head = q_THD.shape[1] // keys.shape[2]
    return (
        sizes == (576, 512, 64)
        and (keys.shape[2] == 1 or per_head > HEIGHTS[2] // 2)  # rows of a unit are consecutive
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and keys.dtype == q_THD.dtype
        and options.window is None
        and options.softcap is None
        and options.sinks_H is None
        and not any(level.causal for level in prepared.levels)
        and keys.stride(3) == 1
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q_THD, keys))  # as TMA needs
        and keys.stride(1) % 8 == 0
        and keys.stride(0) == keys.shape[1] * keys.stride(1)  # slots are rows of one matrix
        and _has_gluon(q_THD.device)
    )


@cache
def _has_gluon(device: torch.device) -> bool:
    """Return whether a device and Triton's version run the Gluon kernels."""
    if _INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from treegen.ops.attention.gpu import fold_tall_kernels, stream_kernels  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is experimental
        return False
    return True


def _can_fold_tall(call: LayerCall) -> bool:
    """Return whether the kernel for tall units supports a layer and its device."""
    if not _has_gluon(call.q_THD.device):
        return False
    from treegen.ops.attention.gpu.fold_tall_kernels import can_fold_tall

    return can_fold_tall(call)


def _head_groups(heads: int) -> int:
    """Return the smallest number of equal groups of query heads that fit into a unit's rows."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= HEIGHTS[2])


class Gluon(Triton):
    """As `Triton`, with a Gluon kernel for latents on Hopper GPUs where it can read them."""

    name = "gluon"
    streams = True


class Invariant(Triton):
    """Attention that folds keys in, in the order of their positions.

    Where levels begin does not affect any bit, if their first positions are multiples of 16.
    """

    name = "invariant"
    invariant = True

    def fill(self, call: LayerCall) -> None:
        """Fold in the keys of all levels, and fill the results and LSE."""
        work, q_THD = call.work, call.q_THD
        (num_rows, q_heads, _), v_dim = q_THD.shape, call.values.shape[3]
        num_parts, num_launches = work.host.num_parts, len(work.units)
        sums = stats = call.lse_TH  # placeholders that no kernel reads
        if num_launches > 1 or num_parts > 1:
            sums = q_THD.new_empty(num_parts, num_rows, q_heads, v_dim, dtype=torch.float32)
            stats = q_THD.new_zeros(2, num_parts, num_rows, q_heads, dtype=torch.float32)
        arrays = sums, stats, call.sinks, call.out_THV, call.lse_TH
        counts, has_sinks = (num_rows, num_parts), call.options.sinks_H is not None
        is_tall = work.host.sees_all if _can_fold_tall(call) else [False] * num_launches
        processors, kv_heads = count_processors(q_THD.device), call.keys.shape[2]
        for index, (kind, units) in enumerate(zip(work.host.kinds, work.units, strict=True)):
            if len(units):
                few = are_few(len(work.host.units[index]) * kv_heads, kind, processors)
                height = max(HEIGHTS[kind], triton.next_power_of_2(call.per_head))
                last = index == num_launches - 1 and num_parts == 1
                if height == HEIGHTS[-1] and not last and is_tall[index]:
                    from treegen.ops.attention.gpu.fold_tall_kernels import launch_fold_tall

                    launch_fold_tall(call, units, sums, stats, first=index == 0)
                    continue
                call.launch_units(
                    fold_units,
                    units,
                    height,
                    arrays,
                    counts,
                    partial(fold_tuning, few=few, converts=call.keys.dtype != q_THD.dtype),
                    HAS_SINKS=has_sinks,
                    FIRST=index == 0,
                    LAST=last,
                )
        if num_parts > 1:
            call.launch_merge(merge_sums, arrays, *counts)
