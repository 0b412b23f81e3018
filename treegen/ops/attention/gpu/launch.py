"""One layer's attention as its launches take it: the arguments that all kernels over units share.

Legend: T query rows, H query heads, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from treegen.ops.attention.gpu.state import DeviceWork
from treegen.ops.attention.gpu.tuning import shared_memory
from treegen.ops.attention.types import AttentionOptions

MERGED_PAIRS = 8  # pairs of a row and a head that a program of a merge takes


@dataclass(slots=True)
class LayerCall:
    """Queries, the pool, and what is to be filled. is_latent: values are the first of keys."""

    q_THD: Tensor
    keys: Tensor
    values: Tensor
    positions_T: Tensor | None
    options: AttentionOptions
    work: DeviceWork
    out_THV: Tensor
    lse_TH: Tensor
    is_latent: bool = False

    @property
    def per_head(self) -> int:
        """Query heads of a key head."""
        return self.q_THD.shape[1] // self.keys.shape[2]

    @property
    def sinks(self) -> Tensor:
        """What attends to nothing, for each head; without sinks a stand-in that nothing reads."""
        return self.lse_TH if self.options.sinks_H is None else self.options.sinks_H.contiguous()

    def launch_units(
        self,
        kernel: Any,
        units: Tensor,
        height: int,
        arrays: tuple[Tensor, ...],
        counts: tuple[int, ...],
        tuning: Callable[[int, int, torch.dtype, int], dict[str, Any]],
        **own: int,
    ) -> None:
        """One launch of units of one height.

        Args:
            height: Rows of a program.
            arrays: What only this kernel takes.
            counts: What only this kernel takes.
            own: What only this kernel takes.
            tuning: The block of keys, stages and warps for a height, a width, a type and a shared
                memory.
        """
        q_THD, keys, values, options = self.q_THD, self.keys, self.values, self.options
        _, q_heads, k_dim = q_THD.shape
        page_size, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
        # Slots of the pool are one dimension for the kernel.
        slots_k, slots_v = keys.view(-1, kv_heads, k_dim), values.view(-1, kv_heads, v_dim)
        has_window = options.window is not None
        has_positions = self.positions_T is not None and (has_window or self.work.host.causal)
        kernel[(len(units) * kv_heads,)](
            q_THD,
            slots_k,
            slots_v,
            self.work.pages,
            units,
            self.positions_T if has_positions else units,
            *arrays,
            options.scale,
            options.window or 0,
            options.softcap or 0.0,
            q_THD.stride(0),
            q_THD.stride(1),
            slots_k.stride(0),
            slots_k.stride(1),
            slots_v.stride(0),
            slots_v.stride(1),
            len(units),
            *counts,
            H=q_heads,
            PER_HEAD=self.per_head,
            D=k_dim,
            V=v_dim,
            BLOCK_D=block_of(k_dim - v_dim if self.is_latent else k_dim),
            BLOCK_V=block_of(v_dim),
            PAGE=page_size,
            BLOCK_M=height,
            HAS_POSITIONS=has_positions,
            HAS_WINDOW=has_window,
            HAS_CAP=options.softcap is not None,
            **own,
            **tuning(height, self.width, q_THD.dtype, shared_memory(q_THD.device)),
        )

    @property
    def width(self) -> int:
        """Width of the widest block."""
        return width_of(self.q_THD, self.values, self.is_latent)

    def launch_merge(
        self, kernel: Any, arrays: tuple[Tensor, ...], *counts: int, **own: int
    ) -> None:
        """The launch that merges parts; arrays, counts, own: what the kernel takes."""
        (num_rows, q_heads, _), v_dim = self.q_THD.shape, self.values.shape[3]
        kernel[(triton.cdiv(num_rows * q_heads, MERGED_PAIRS),)](
            *arrays,
            *counts,
            H=q_heads,
            V=v_dim,
            BLOCK_V=triton.next_power_of_2(v_dim),
            BLOCK_M=MERGED_PAIRS,
            HAS_SINKS=self.options.sinks_H is not None,
            **own,
            num_warps=4,
        )


def block_of(dim: int) -> int:
    """Width of a block that holds a head: blocks of a matrix product are 16 wide at least."""
    return max(int(triton.next_power_of_2(dim)), 16)


def width_of(q_THD: Tensor, values: Tensor, is_latent: bool = False) -> int:
    """Width of the wider of the blocks that hold keys and values, or latents and the rest."""
    k_dim, v_dim = q_THD.shape[2], values.shape[3]
    return max(block_of(k_dim - v_dim if is_latent else k_dim), block_of(v_dim))
