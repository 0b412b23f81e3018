"""Triton kernels for fused experts: sorting of pairs, their products, and the weighted sums.

A pair is a token and one of its experts. Pairs are sorted by expert into blocks, and one program
computes some outputs of one block, so the matrix of an expert with one block is read once. The
matrix is the left operand and the block's rows are columns, because tensor cores take 64 outputs at
once even for few rows; a row's sums have the same order in blocks of any size.

Legend: T tokens, X experts of a token, S = T X pairs, E experts, N outputs, K inputs, B blocks,
D width of outputs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegen.model.linear.blocks import num_blocks, rows_of_block

_PAIRS_PER_PROGRAM, _BLOCKS_PER_PROGRAM = 256, 32  # pairs, and blocks of pairs, per program
_COLUMNS: Final = 1024  # columns of a weighted sum per program


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen, counts, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    """Count the pairs of each expert.

    Args:
        chosen: Pointer to the expert of each pair.
        counts: Pointer to the counts of experts [E].
        num_pairs: The number of pairs.
        E: The number of experts. Pairs with an expert not below E are ignored.
        BLOCK: Pairs per program.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + pair, mask=pair < num_pairs, other=E)
    tl.atomic_add(counts + expert, 1, mask=expert < E, sem="relaxed")


@triton.jit(do_not_specialize=["max_blocks"])
def _list_blocks(
    counts,
    begins,
    blocks,
    max_blocks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide the pairs of each expert into blocks. There may be room for more blocks.

    Args:
        counts: Pointer to the number of pairs of each expert [E].
        begins: Pointer to the index in the order of each expert's first pair [E]; written.
        blocks: Pointer to expert (-1 for none), start and stop in the order of each block
            [3, max_blocks]; written.
        max_blocks: Maximum number of blocks.
        E: The number of experts.
        BLOCK_E: E rounded up to a power of two.
        ROWS: Maximum pairs of a block.
        BLOCK: Blocks per program.
    """
    e = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + e, mask=e < E, other=0)
    end_E = tl.cumsum(count_E, 0)
    size_E = (count_E + ROWS - 1) // ROWS
    until_E = tl.cumsum(size_E, 0)
    if tl.program_id(0) == 0:
        tl.store(begins + e, end_E - count_E, mask=e < E)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((until_E[None, :] <= b[:, None]).to(tl.int32), 1)
    is_mine = e[None, :] == expert[:, None]
    skipped = b - tl.sum(tl.where(is_mine, (until_E - size_E)[None, :], 0), 1)
    first = tl.sum(tl.where(is_mine, (end_E - count_E)[None, :], 0), 1) + skipped * ROWS
    end = tl.sum(tl.where(is_mine, end_E[None, :], 0), 1)
    mask = b < max_blocks
    tl.store(blocks + b, tl.where(expert < E, expert, -1), mask=mask)
    tl.store(blocks + max_blocks + b, first, mask=mask)
    tl.store(blocks + 2 * max_blocks + b, tl.minimum(first + ROWS, end), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(chosen, begins, order, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    """Sort the pairs by expert. Pairs of one expert have any order, because rows do not mix.

    Args:
        chosen: Pointer to the expert of each pair.
        begins: Pointer to the next free index in the order of each expert [E]; advanced.
        order: Pointer to the pairs sorted by expert; written.
        num_pairs: The number of pairs.
        E: The number of experts. Pairs with an expert not below E are left out.
        BLOCK: Pairs per program.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + pair, mask=pair < num_pairs, other=E)
    at = tl.atomic_add(begins + expert, 1, mask=expert < E, sem="relaxed")
    tl.store(order + at, pair, mask=expert < E)


def sort_pairs(chosen_TX: Tensor, experts: int, order_S: Tensor, blocks_3B: Tensor) -> None:
    """Fill order and blocks as documented in `treegen.model.linear.experts.group_by_expert`.

    Args:
        chosen_TX: The experts of each token [T, X].
        experts: The number of experts.
        order_S: int32 [S], the pairs sorted by expert; overwritten.
        blocks_3B: int32 [3, B], expert, start and stop in the order of each block; overwritten.
    """
    num_pairs, max_blocks = chosen_TX.numel(), blocks_3B.shape[1]
    if not num_pairs:
        return
    chosen, grid = chosen_TX.contiguous(), (triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM),)
    counts_E = torch.zeros(experts, dtype=torch.int32, device=chosen.device)
    begins_E = torch.empty_like(counts_E)
    _count[grid](chosen, counts_E, num_pairs, E=experts, BLOCK=_PAIRS_PER_PROGRAM)
    _list_blocks[(triton.cdiv(max_blocks, _BLOCKS_PER_PROGRAM),)](
        counts_E,
        begins_E,
        blocks_3B,
        max_blocks,
        E=experts,
        BLOCK_E=triton.next_power_of_2(experts),
        ROWS=rows_of_block(num_pairs, experts),
        BLOCK=_BLOCKS_PER_PROGRAM,
        num_warps=8,
    )
    _sort[grid](chosen, begins_E, order_S, num_pairs, E=experts, BLOCK=_PAIRS_PER_PROGRAM)


@triton.jit(do_not_specialize=["max_blocks"])
def _grouped_product(
    rows,
    row_scales,
    weights,
    weight_scales,
    bias,
    order,
    blocks,
    out,
    max_blocks,
    N: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute some outputs [BLOCK_N] of the pairs [ROWS] of a block in one program.

    Args:
        rows: Pointer to inputs [S / EACH, K].
        row_scales: Pointer to the scale of each input row; unused without HAS_SCALES.
        weights: Pointer to the weights of all experts [E, N, K] or [E, K, N].
        weight_scales: Pointer to the scale of each output [E, N]; unused without HAS_SCALES.
        bias: Pointer to the biases [E, N]; unused without HAS_BIAS.
        order: Pointer to the pairs sorted by expert [S].
        blocks: Pointer to expert, start and stop in the order of each block [3, max_blocks].
        out: Pointer to the outputs of each pair [S, N].
        max_blocks: Maximum number of blocks.
        N: The number of outputs.
        K: The number of inputs.
        EACH: Consecutive pairs that share an input row.
        STRIDE_N: Stride of a weight along outputs.
        STRIDE_K: Stride of a weight along inputs.
        HAS_SCALES: Whether rows and weights are in FP8.
        HAS_BIAS: Whether there are biases.
        PRECISION: The input precision of `tl.dot`.
        ROWS: Maximum pairs of a block.
        BLOCK_N: Outputs per program.
        BLOCK_K: Inputs per step.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // parts
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        m = tl.load(blocks + max_blocks + block) + tl.arange(0, ROWS)
        mask_M = m < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(order + m, mask=mask_M, other=0).to(tl.int64)
        row = pair // EACH
        n = (tl.program_id(0) % parts) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_N = n < N
        k = tl.arange(0, BLOCK_K)
        row_at = rows + row[None, :] * K + k[:, None]
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
        weight_at = weights + expert * N * K + n[:, None] * STRIDE_N + k[None, :] * STRIDE_K
        for start in range(0, K, BLOCK_K):
            in_bounds = k < K - start
            w = tl.load(
                weight_at + start * STRIDE_K, mask=mask_N[:, None] & in_bounds[None, :], other=0.0
            )
            x = tl.load(row_at + start, mask=mask_M[None, :] & in_bounds[:, None], other=0.0)
            total = tl.dot(w, x, total, input_precision=PRECISION)
        if HAS_SCALES:
            total *= tl.load(row_scales + row, mask=mask_M, other=0.0)[None, :]
            total *= tl.load(weight_scales + expert * N + n, mask=mask_N, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + expert * N + n, mask=mask_N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out + pair[None, :] * N + n[:, None],
            total.to(out.dtype.element_ty),
            mask=mask_M[None, :] & mask_N[:, None],
        )


def grouped_product(
    rows: Tensor,
    row_scales: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    blocks: Tensor,
    pairs_per_row: int,
    transposed: bool,
    out: Tensor,
) -> None:
    """Fill out [S, N] as documented in `treegen.model.linear.experts.grouped_product`.

    Args:
        rows: Inputs [S / pairs_per_row, K].
        row_scales: Float32 [S / pairs_per_row], the scales of FP8 rows; None for rows that are not
            FP8.
        weights: Weights [E, N, K], or [E, K, N] if transposed.
        weight_scales: Float32 [E, N], the scales of FP8 weights; None for weights that are not FP8.
        bias: Biases [E, N]; None for none.
        order: int32 [S], the pairs sorted by expert.
        blocks: int32 [3, B], expert, start and stop in the order of each block.
        pairs_per_row: Consecutive pairs that share an input row.
        transposed: Whether weights have inputs first.
        out: Outputs [S, N], dense; overwritten.
    """
    (num_pairs, outputs), experts, inputs = out.shape, len(weights), rows.shape[1]
    if not num_pairs:
        return
    size = rows_of_block(num_pairs, experts)
    narrow, wide = size <= 64, weights.element_size() == 1
    block_n = 64 if narrow and inputs >= 1024 and not wide else 128
    _grouped_product[(num_blocks(num_pairs, experts) * triton.cdiv(outputs, block_n),)](
        rows.contiguous(),
        row_scales,
        weights,
        weight_scales,
        bias,
        order,
        blocks,
        out,
        blocks.shape[1],
        N=outputs,
        K=inputs,
        EACH=pairs_per_row,
        STRIDE_N=1 if transposed else inputs,
        STRIDE_K=outputs if transposed else 1,
        HAS_SCALES=row_scales is not None,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        ROWS=size,
        BLOCK_N=block_n,
        BLOCK_K=128 if wide else 64,
        num_warps=4 if narrow else 8,
        num_stages=3,
    )


@triton.jit
def _weighted_sum(
    pairs,
    chosen,
    weights,
    out,
    D: tl.constexpr,
    X: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum some columns of what one token's experts computed, always in the same order.

    Args:
        pairs: Pointer to the outputs of all pairs [T X, D].
        chosen: Pointer to the expert of each pair [T, X].
        weights: Pointer to the weight of each pair [T, X].
        out: Pointer to the sums [T, D].
        D: The width of outputs.
        X: Experts per token.
        E: The number of experts. Pairs with an expert not below E count as zero.
        BLOCK: Columns per program.
    """
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for x in tl.static_range(X):
        pair = token * X + x
        # Outputs of pairs without an expert here were never written.
        written = tl.where(tl.load(chosen + pair) < E, D, 0)
        values = tl.load(pairs + pair * D + d, mask=d < written, other=0.0).to(tl.float32)
        total += values * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


def weighted_sum(pairs: Tensor, chosen: Tensor, weights: Tensor, experts: int, out: Tensor) -> None:
    """Fill out [T, D] with the sums of each token's pairs, each times its weight.

    Args:
        pairs: Outputs of all pairs [T X, D].
        chosen: The experts of each token [T, X].
        weights: Their weights [T, X].
        experts: The number of experts. Pairs with an expert not below it count as zero.
        out: Sums [T, D], dense; overwritten.
    """
    (tokens, num_chosen), width = chosen.shape, out.shape[1]
    if tokens:
        block = min(triton.next_power_of_2(width), _COLUMNS)
        _weighted_sum[(tokens, triton.cdiv(width, block))](
            pairs,
            chosen.contiguous(),
            weights.contiguous(),
            out,
            D=width,
            X=num_chosen,
            E=experts,
            BLOCK=block,
        )
