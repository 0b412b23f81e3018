"""A kernel that merges results of levels read as latents and of expanded levels, and its launch.

Legend: M pairs of a query row and a head, T query rows, H query heads, V numbers of a result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from treegen.common.device import use_device


@triton.jit(do_not_specialize=("num_pairs",))
def merge_two(
    a,
    a_lses,
    b,
    b_lses,
    out,
    a_row,
    a_head,
    b_row,
    b_head,
    num_pairs,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge two results; one program per BLOCK_M pairs of a row and a head.

    Args:
        a: First results [T, H, V].
        a_lses: Their natural LSEs [T, H].
        b: Second results [T, H, V].
        b_lses: Their natural LSEs [T, H].
        out: Output [T, H, V], dense.
        a_row: Stride of `a` between rows, in elements.
        a_head: Stride of `a` between heads.
        b_row: Stride of `b` between rows.
        b_head: Stride of `b` between heads.
        num_pairs: T * H.
        H: Query heads.
        V: Value dimension.
        BLOCK_V: V, rounded up to a power of two.
        BLOCK_M: Pairs per program.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = pair < num_pairs
    row, head = pair // H, pair % H
    e = tl.arange(0, BLOCK_V)
    in_bounds = mask[:, None] & (e < V)[None, :]
    a_lse = tl.load(a_lses + pair, mask=mask, other=float("-inf"))
    b_lse = tl.load(b_lses + pair, mask=mask, other=float("-inf"))
    top = tl.maximum(a_lse, b_lse)
    shift = tl.where(top == float("-inf"), 0.0, top)
    a_part, b_part = tl.exp(a_lse - shift), tl.exp(b_lse - shift)
    total = a_part + b_part
    divisor = tl.where(total > 0, total, 1.0)
    a_MV = tl.load(
        a + (row * a_row + head * a_head)[:, None] + e[None, :],
        mask=in_bounds & (a_part > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    b_MV = tl.load(
        b + (row * b_row + head * b_head)[:, None] + e[None, :],
        mask=in_bounds & (b_part > 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    sum_MV = a_MV * (a_part / divisor)[:, None] + b_MV * (b_part / divisor)[:, None]
    tl.store(out + pair[:, None] * V + e[None, :], sum_MV.to(out.dtype.element_ty), mask=in_bounds)


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
                *a_THV.stride()[:2],
                *b_THV.stride()[:2],
                num_pairs,
                H=num_heads,
                V=v_dim,
                BLOCK_V=triton.next_power_of_2(v_dim),
                BLOCK_M=_PAIRS,
                num_warps=4,
            )
    return out_THV
