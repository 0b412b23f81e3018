"""Attention over levels on a GPU: a Triton kernel over work lists, beside torch's dense kernel.

Each level but the last leaves partial results in float32; the launch for the last one, if its
groups are single rows and the parts are few, merges them on its way. Otherwise a kernel of its own
does.

Legend: T query rows, H query heads, V value dimension, P parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from treegen.attention.gpu.dense import attend_dense, takes
from treegen.attention.gpu.kernels import attend_units, merge_parts
from treegen.attention.gpu.state import DeviceWork, TritonState, WorkShape
from treegen.attention.gpu.tuning import shared_memory, tallest, tuning
from treegen.attention.gpu.units import HEIGHTS
from treegen.attention.level import HostLevel
from treegen.attention.types import NEEDS_AMPERE, KVPair, Options, Prepared
from treegen.device import current
from treegen.errors import InputError

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_MERGED_PAIRS = 8  # pairs of a row and a head that a program of the merge takes


class Triton:
    """One kernel for all levels but a trunk, which the dense one takes where it can.

    Takes 16-bit and float32 tensors.
    """

    name = "triton"

    def refusal(self, device: torch.device) -> str | None:
        """Runs on CUDA devices since Ampere, and anywhere in Triton's interpreter."""
        if _INTERPRETED:
            return None
        if device.type != "cuda":
            return f"takes CUDA tensors, got {device}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return NEEDS_AMPERE
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> TritonState:
        """Keep the host arrays; work lists need the head count, known at the first layer."""
        return TritonState(tuple(levels), device)

    def attend(
        self, q_THD: Tensor, pairs: Sequence[KVPair], prepared: Prepared, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Partial results of all levels in float32, merged in float32, rounded once.

        What the dense kernel computes is rounded before the merge, too.

        Raises:
            InputError: levels have different pools, or the tensors are float64.
        """
        keys, values = pairs[0]
        if any(pair[0] is not keys or pair[1] is not values for pair in pairs):
            raise InputError(f"impl {self.name!r} takes one pool for all levels; use 'reference'")
        if q_THD.dtype == torch.float64:
            raise InputError(f"impl {self.name!r} computes in float32; use 'reference' for float64")
        # The last dimension must be dense for the kernels.
        q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        (num_rows, q_heads, _), v_dim = q_THD.shape, values.shape[3]
        out_THV = q_THD.new_empty(num_rows, q_heads, v_dim)
        lse_TH = q_THD.new_empty(num_rows, q_heads, dtype=torch.float32)
        if num_rows == 0:
            return out_THV, lse_TH
        state: TritonState = prepared.state
        work = state.work(self.shape_of(q_THD, keys, values, options))
        with current(q_THD.device):
            self.launch(q_THD, pairs[0], prepared.positions_T, options, work, out_THV, lse_TH)
        return out_THV, lse_TH

    def shape_of(self, q_THD: Tensor, keys: Tensor, values: Tensor, options: Options) -> WorkShape:
        """What the work lists of a layer depend on."""
        num_rows, q_heads = q_THD.shape[:2]
        highest = tallest(width_of(q_THD, values), q_THD.dtype, shared_memory(q_THD.device))
        return WorkShape(
            num_rows, keys.shape[2], q_heads // keys.shape[2], keys.shape[1],
            takes(q_THD, keys, values, options), highest,
        )  # fmt: skip

    def launch(
        self,
        q_THD: Tensor,
        pair: KVPair,
        positions_T: Tensor | None,
        options: Options,
        work: DeviceWork,
        out_THV: Tensor,
        lse_TH: Tensor,
    ) -> None:
        """Fill out and LSE."""
        _Call(q_THD, *pair, positions_T, options, work, out_THV, lse_TH).run()


@dataclass(slots=True)
class _Call:
    """The launches of one layer."""

    q_THD: Tensor
    keys: Tensor
    values: Tensor
    positions_T: Tensor | None
    options: Options
    work: DeviceWork
    out_THV: Tensor
    lse_TH: Tensor

    def run(self) -> None:
        """Fill out and LSE."""
        work, q_THD = self.work, self.q_THD
        (num_rows, q_heads, _), v_dim = q_THD.shape, self.values.shape[3]
        num_parts, dense_rows, num_chunks, fold = work.host.num_parts, 0, 0, 1
        parts = q_THD.new_empty(num_parts, num_rows, q_heads, v_dim, dtype=torch.float32)
        lses = q_THD.new_empty(num_parts, num_rows, q_heads, dtype=torch.float32)
        if not work.host.complete:
            lses.fill_(-torch.inf)
        dense, dense_lses = self.out_THV, self.lse_TH  # stand-ins that nothing reads
        if work.dense is not None:
            dense, dense_lses = attend_dense(
                q_THD, self.keys, self.values, work.dense, self.options.scale
            )
            num_chunks, dense_rows, fold = dense.shape[:3]
        sinks = self.lse_TH if self.options.sinks_H is None else self.options.sinks_H.contiguous()
        arrays = parts, lses, dense, dense_lses, sinks, self.out_THV, self.lse_TH
        counts = num_rows, dense_rows, num_chunks
        merging = {"FOLD": fold, "HAS_SINKS": self.options.sinks_H is not None}
        for kind, units in zip(work.host.kinds, work.units, strict=True):
            if len(units):
                self._launch(units, kind, arrays, counts, FOLD=1, HAS_SINKS=False, LAST=False)
        if len(work.last):
            self._launch(work.last, work.host.last_kind, arrays, counts, **merging, LAST=True)
            return
        merge_parts[(triton.cdiv(num_rows * q_heads, _MERGED_PAIRS),)](
            *arrays, *counts, num_parts, H=q_heads, V=v_dim,
            BLOCK_V=triton.next_power_of_2(v_dim), BLOCK_M=_MERGED_PAIRS, **merging, num_warps=4,
        )  # fmt: skip

    def _launch(
        self,
        units: Tensor,
        kind: int,
        arrays: tuple[Tensor, ...],
        counts: tuple[int, int, int],
        **merging: int,
    ) -> None:
        """One launch of units of one height; merging: FOLD, HAS_SINKS and LAST of the kernel."""
        q_THD, keys, values, options = self.q_THD, self.keys, self.values, self.options
        _, q_heads, k_dim = q_THD.shape
        page_size, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
        per_head = q_heads // kv_heads
        # Slots of the pool are one dimension for the kernel.
        slots_k, slots_v = keys.view(-1, kv_heads, k_dim), values.view(-1, kv_heads, v_dim)
        has_window = options.window is not None
        has_positions = self.positions_T is not None and (has_window or self.work.host.causal)
        block_m = HEIGHTS[kind]
        if block_m > 1:
            block_m = max(block_m, triton.next_power_of_2(per_head))
        block_d, block_v = block_of(k_dim), block_of(v_dim)
        attend_units[(len(units) * kv_heads,)](
            q_THD, slots_k, slots_v, self.work.pages, units,
            self.positions_T if has_positions else units, *arrays,
            options.scale, options.window or 0, options.softcap or 0.0,
            q_THD.stride(0), q_THD.stride(1), slots_k.stride(0), slots_k.stride(1),
            slots_v.stride(0), slots_v.stride(1), len(units), *counts,
            H=q_heads, PER_HEAD=per_head, D=k_dim, V=v_dim, BLOCK_D=block_d, BLOCK_V=block_v,
            PAGE=page_size, BLOCK_M=block_m, HAS_POSITIONS=has_positions, HAS_WINDOW=has_window,
            HAS_CAP=options.softcap is not None, **merging,
            **tuning(block_m, width_of(q_THD, values), q_THD.dtype, shared_memory(q_THD.device)),
        )  # fmt: skip


def block_of(dim: int) -> int:
    """Width of a block that holds a head: blocks of a matrix product are 16 wide at least."""
    return max(int(triton.next_power_of_2(dim)), 16)


def width_of(q_THD: Tensor, values: Tensor) -> int:
    """Width of the wider of the blocks that hold keys and values."""
    return max(block_of(q_THD.shape[2]), block_of(values.shape[3]))
