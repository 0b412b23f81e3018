"""Batch-invariant attention on a GPU: the bits of a row depend on the row's own keys alone.

They do not depend on other rows of the batch, on how keys are shared, or on when they are computed;
see `fold_kernels`. Each level is one launch, in order, and the last one writes the result.

Legend: T query rows, H query heads, D key dimension, V value dimension, P parts.
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
    """Attention that folds keys in, in the order of their positions.

    Where levels begin does not affect any bit, if their first positions are multiples of 16.
    """

    name = "invariant"

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> TritonState:
        """Store the levels; work lists need the head count, which the first layer has.

        Args:
            levels: The levels, on the host.
            positions_T: Not used; `attend` reads the positions of the prepared levels.
            device: Where the tensors of the layers are.
        """
        return TritonState(tuple(levels), device, invariant=True)

    def takes_dense(
        self, q_THD: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> bool:
        """Return False, because the dense kernel sums in another order.

        Args:
            q_THD: Not used.
            keys: Not used.
            values: Not used.
            options: Not used.
        """
        return False

    def reads_latents(self, keys: Tensor, values: Tensor) -> bool:
        """Return False: latents are read like any other keys and values."""
        return False

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
