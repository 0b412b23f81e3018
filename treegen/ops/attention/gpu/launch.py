"""Kernel launches of one layer's attention, with the arguments that all kernels over units share.

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

MERGED_PAIRS = 8  # pairs of a row and a head per program of a merge kernel


@dataclass(slots=True)
class LayerCall:
    """The inputs and outputs of one layer's attention."""

    q_THD: Tensor
    """The queries."""
    keys: Tensor
    """Keys of the page pool."""
    values: Tensor
    """Values of the page pool."""
    positions_T: Tensor | None
    """The position of each query row; None if nothing needs positions."""
    options: AttentionOptions
    """The softmax options of the layer."""
    work: DeviceWork
    """The work list."""
    out_THV: Tensor
    """The outputs, to be filled."""
    lse_TH: Tensor
    """The log-sum-exps, to be filled."""
    is_latent: bool = False
    """Whether values are the first numbers of keys."""
    streamed: bool = False
    """Whether latents are read as a stream; see `stream_kernels`."""

    @property
    def per_head(self) -> int:
        """The number of query heads per key head."""
        return self.q_THD.shape[1] // self.keys.shape[2]

    @property
    def sinks(self) -> Tensor:
        """The sink of each head [H]; without sinks, a placeholder that no kernel reads."""
        return self.lse_TH if self.options.sinks_H is None else self.options.sinks_H.contiguous()

    def launch_units(
        self,
        kernel: Any,
        units: Tensor,
        height: int,
        arrays: tuple[Tensor, ...],
        counts: tuple[int, ...],
        tuning: Callable[[int, int, torch.dtype, int], dict[str, Any]],
        **constants: int,
    ) -> None:
        """Launch a kernel once, on units of one height.

        Args:
            kernel: The Triton kernel.
            units: The units [U, 9].
            height: BLOCK_M, the folded query rows per program.
            arrays: Tensors that only this kernel takes.
            counts: Numbers that only this kernel takes.
            tuning: Returns BLOCK_N, num_warps and num_stages for a height, a head width, a type and
                the bytes of shared memory.
            constants: Keyword arguments that only this kernel takes.
        """
        q_THD, keys, values, options = self.q_THD, self.keys, self.values, self.options
        _, q_heads, k_dim = q_THD.shape
        page_size, kv_heads, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
        # The kernel sees the slots of the pool as one dimension.
        slots_k, slots_v = keys.view(-1, kv_heads, k_dim), values.view(-1, kv_heads, v_dim)
        window = options.window
        has_window = 0 if window is None else 1 + window.is_chunk
        has_positions = self.positions_T is not None and bool(has_window or self.work.host.causal)
        kernel[(len(units) * kv_heads,)](
            q_THD,
            slots_k,
            slots_v,
            self.work.pages,
            units,
            self.positions_T if has_positions else units,
            *arrays,
            options.scale,
            0 if window is None else window.size,
            options.softcap or 0.0,
            *q_THD.stride()[:2],
            *slots_k.stride()[:2],
            *slots_v.stride()[:2],
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
            **constants,
            **tuning(height, self.width, q_THD.dtype, shared_memory(q_THD.device)),
        )

    @property
    def width(self) -> int:
        """The width of the widest block."""
        return width_of(self.q_THD, self.values, self.is_latent)

    def launch_merge(
        self, kernel: Any, arrays: tuple[Tensor, ...], *counts: int, **constants: int
    ) -> None:
        """Launch a kernel that merges parts.

        Args:
            kernel: The Triton kernel.
            arrays: Tensors that the kernel takes.
            counts: Numbers that the kernel takes.
            constants: Keyword arguments that only this kernel takes.
        """
        (num_rows, q_heads, _), v_dim = self.q_THD.shape, self.values.shape[3]
        kernel[(triton.cdiv(num_rows * q_heads, MERGED_PAIRS),)](
            *arrays,
            *counts,
            H=q_heads,
            V=v_dim,
            BLOCK_V=triton.next_power_of_2(v_dim),
            BLOCK_M=MERGED_PAIRS,
            HAS_SINKS=self.options.sinks_H is not None,
            **constants,
            num_warps=4,
        )


def block_of(dim: int) -> int:
    """Return the width of a block that holds a head, at least 16 for matrix products."""
    return max(int(triton.next_power_of_2(dim)), 16)


def width_of(q_THD: Tensor, values: Tensor, is_latent: bool = False) -> int:
    """Return the larger width of the two blocks of a key and value, or of a latent and its rest.

    Args:
        q_THD: Queries [T, H, D].
        values: Values of the pool.
        is_latent: Whether values are the first numbers of keys.
    """
    k_dim, v_dim = q_THD.shape[2], values.shape[3]
    return max(block_of(k_dim - v_dim if is_latent else k_dim), block_of(v_dim))
