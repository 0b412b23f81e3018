"""Attention on a GPU whose bits for a row depend on the row's own keys alone.

Not on the rows beside it, how keys are shared, or when they are computed: see `fold_kernels`. One
launch a level, in order; the last one writes the result.

Legend: T query rows, H query heads, V value dimension, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from treegen.ops.attention.gpu.attend import Triton
from treegen.ops.attention.gpu.fold_kernels import fold_units, merge_sums
from treegen.ops.attention.gpu.launch import LayerCall
from treegen.ops.attention.gpu.state import TritonState
from treegen.ops.attention.gpu.tuning import fold_tuning
from treegen.ops.attention.gpu.units import HEIGHTS
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.types import AttentionOptions


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

    def takes_dense(
        self, q_THD: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> bool:
        """No: the dense kernel sums in another order."""
        return False

    def reads_latents(self, keys: Tensor, values: Tensor) -> bool:
        """No: it takes them for keys and values like others."""
        return False

    def fill(self, call: LayerCall) -> None:
        """Fold in the keys of all levels; fill out and LSE."""
        work, q_THD = call.work, call.q_THD
        (num_rows, q_heads, _), v_dim = q_THD.shape, call.values.shape[3]
        num_parts, num_launches = work.host.num_parts, len(work.units)
        sums = stats = call.lse_TH  # stand-ins that nothing reads
        if num_launches > 1 or num_parts > 1:
            sums = q_THD.new_empty(num_parts, num_rows, q_heads, v_dim, dtype=torch.float32)
            stats = q_THD.new_zeros(2, num_parts, num_rows, q_heads, dtype=torch.float32)
        arrays = sums, stats, call.sinks, call.out_THV, call.lse_TH
        counts, has_sinks = (num_rows, num_parts), call.options.sinks_H is not None
        for index, (kind, units) in enumerate(zip(work.host.kinds, work.units, strict=True)):
            if len(units):
                height = max(HEIGHTS[kind], triton.next_power_of_2(call.per_head))
                last = index == num_launches - 1 and num_parts == 1
                call.launch_units(
                    fold_units,
                    units,
                    height,
                    arrays,
                    counts,
                    fold_tuning,
                    HAS_SINKS=has_sinks,
                    FIRST=index == 0,
                    LAST=last,
                )
        if num_parts > 1:
            call.launch_merge(merge_sums, arrays, *counts)
