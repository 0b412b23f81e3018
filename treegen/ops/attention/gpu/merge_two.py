"""Merging of two attention results: over latents, and over expanded keys and values.

Legend: T query rows, H query heads, V value dimension.
"""

from __future__ import annotations

import triton
from torch import Tensor

from treegen.common.device import use_device
from treegen.ops.attention.gpu.latent_kernels import merge_two

_PAIRS = 8  # pairs of a row and a head per program


def merge_pair(a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor) -> Tensor:
    """Merge two results in one launch, and round to the type of the second.

    Args:
        a_THV: First results [T, H, V].
        a_lse_TH: Their LSE [T, H].
        b_THV: Second results [T, H, V].
        b_lse_TH: Their LSE [T, H].

    Returns:
        The merged results [T, H, V].
    """
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
