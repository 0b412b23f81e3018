"""Attention on a GPU whose bits for a row depend on the row's own keys alone.

Not on the rows beside it, how keys are shared, or when they are computed: see `fold_kernels`. One
launch a level, in order; the last one writes the result.

Legend: T query rows, H query heads, V value dimension, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from treegen.attention.gpu.attend import Triton, block_of, width_of
from treegen.attention.gpu.fold_kernels import fold_units, merge_sums
from treegen.attention.gpu.state import DeviceWork, TritonState, WorkShape
from treegen.attention.gpu.tuning import fold_tuning, shared_memory, tallest
from treegen.attention.gpu.units import HEIGHTS
from treegen.attention.level import HostLevel
from treegen.attention.types import KVPair, Options

_MERGED_PAIRS = 8  # pairs of a row and a head that a program of the merge takes


class Invariant(Triton):
    """Folds keys in, in the order of their positions.

    Levels whose first positions are multiples of 16 may begin anywhere without changing a bit.
    """

    name = "invariant"

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> TritonState:
        """Keep the host arrays; work lists need the head count, known at the first layer."""
        return TritonState(tuple(levels), device, invariant=True)

    def shape_of(self, q_THD: Tensor, keys: Tensor, values: Tensor, options: Options) -> WorkShape:
        """What the work lists of a layer depend on."""
        num_rows, q_heads = q_THD.shape[:2]
        highest = tallest(width_of(q_THD, values), q_THD.dtype, shared_memory(q_THD.device))
        return WorkShape(
            num_rows, keys.shape[2], q_heads // keys.shape[2], keys.shape[1], False, highest
        )

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
        """Fold in the keys of all levels; fill out and LSE."""
        work, q_THD = self.work, self.q_THD
        (num_rows, q_heads, _), v_dim = q_THD.shape, self.values.shape[3]
        num_parts, num_launches = work.host.num_parts, len(work.units)
        sinks = self.lse_TH if self.options.sinks_H is None else self.options.sinks_H.contiguous()
        sums = stats = self.lse_TH  # stand-ins that nothing reads
        if num_launches > 1 or num_parts > 1:
            sums = q_THD.new_empty(num_parts, num_rows, q_heads, v_dim, dtype=torch.float32)
            stats = q_THD.new_zeros(2, num_parts, num_rows, q_heads, dtype=torch.float32)
        arrays = sums, stats, sinks, self.out_THV, self.lse_TH
        for index, (kind, units) in enumerate(zip(work.host.kinds, work.units, strict=True)):
            last = index == num_launches - 1 and num_parts == 1
            if len(units):
                self._launch(units, kind, arrays, FIRST=index == 0, LAST=last)
        if num_parts > 1:
            merge_sums[(triton.cdiv(num_rows * q_heads, _MERGED_PAIRS),)](
                *arrays, num_rows, num_parts, H=q_heads, V=v_dim,
                BLOCK_V=triton.next_power_of_2(v_dim), BLOCK_M=_MERGED_PAIRS,
                HAS_SINKS=self.options.sinks_H is not None, num_warps=4,
            )  # fmt: skip

    def _launch(
        self, units: Tensor, kind: int, arrays: tuple[Tensor, ...], *, FIRST: bool, LAST: bool
    ) -> None:
        """The launch of one level."""
        q_THD, keys, values, options = self.q_THD, self.keys, self.values, self.options
        num_rows, q_heads, k_dim = q_THD.shape
        page_size, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
        per_head = q_heads // kv_heads
        # Slots of the pool are one dimension for the kernel.
        slots_k, slots_v = keys.view(-1, kv_heads, k_dim), values.view(-1, kv_heads, v_dim)
        has_window = options.window is not None
        has_positions = self.positions_T is not None and (has_window or self.work.host.causal)
        block_m = max(HEIGHTS[kind], triton.next_power_of_2(per_head))
        fold_units[(len(units) * kv_heads,)](
            q_THD, slots_k, slots_v, self.work.pages, units,
            self.positions_T if has_positions else units, *arrays,
            options.scale, options.window or 0, options.softcap or 0.0,
            q_THD.stride(0), q_THD.stride(1), slots_k.stride(0), slots_k.stride(1),
            slots_v.stride(0), slots_v.stride(1), len(units), num_rows, self.work.host.num_parts,
            H=q_heads, PER_HEAD=per_head, D=k_dim, V=v_dim,
            BLOCK_D=block_of(k_dim), BLOCK_V=block_of(v_dim), PAGE=page_size, BLOCK_M=block_m,
            HAS_POSITIONS=has_positions, HAS_WINDOW=has_window,
            HAS_CAP=options.softcap is not None, HAS_SINKS=options.sinks_H is not None,
            FIRST=FIRST, LAST=LAST,
            **fold_tuning(
                block_m, width_of(q_THD, values), q_THD.dtype, shared_memory(q_THD.device)
            ),
        )  # fmt: skip
