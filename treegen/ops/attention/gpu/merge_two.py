"""Two results of attention become one: those over latents, and those over copies of keys."""

from __future__ import annotations

import triton
from torch import Tensor

from treegen.common.device import use_device
from treegen.ops.attention.gpu.latent_kernels import merge_two

_PAIRS = 8  # of a row and a head that a program takes


def merge_pair(a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor) -> Tensor:
    """`merge` of two results in one launch, rounded once more to the type of the second."""
    num_rows, num_heads, v_dim = b_THV.shape
    out_THV = b_THV.new_empty(b_THV.shape)
    num_pairs = num_rows * num_heads
    if num_pairs:
        with use_device(b_THV.device):
            merge_two[(triton.cdiv(num_pairs, _PAIRS),)](
                a_THV,
                a_lse_TH,
                b_THV,
                b_lse_TH,
                out_THV,
                a_THV.stride(0),
                a_THV.stride(1),
                b_THV.stride(0),
                b_THV.stride(1),
                num_pairs,
                H=num_heads,
                V=v_dim,
                BLOCK_V=triton.next_power_of_2(v_dim),
                BLOCK_M=_PAIRS,
                num_warps=4,
            )
    return out_THV
