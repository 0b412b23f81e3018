"""Triton kernels for FP8: the input of a gated layer, and products of rows with their experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PER_WARP = 512  # numbers of a row that a warp holds
_OUTPUTS, _INPUTS = 128, 128  # of a block of an expert's matrix


@triton.jit(do_not_specialize=["rows"])
def _silu_quantize(
    gate_up, rounded, scales, rows, most, least, F: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Round a row of silu(gate) * up [F], gate_up [rows, 2 F], and write what to scale it by."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=live, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    largest = tl.maximum(tl.max(tl.abs(product), 0), least)
    # One division for the row: the kernel has more to do for a number than to read it.
    within = tl.minimum(tl.maximum(product * (most / largest), -most), most)
    tl.store(rounded + row * F + at, within.to(rounded.dtype.element_ty), mask=live)
    tl.store(scales + row, largest / most)


def silu_quantize(
    gate_up: Tensor, rounded: Tensor, scales: Tensor, most: float, least: float
) -> None:
    """Fill rounded [rows, F] and scales [rows] for gate_up [rows, 2 F], which is dense."""
    rows, width = rounded.shape
    if rows:
        block = triton.next_power_of_2(width)
        _silu_quantize[(rows,)](
            gate_up, rounded, scales, rows, most, least, F=width, BLOCK=block,
            num_warps=min(max(block // _PER_WARP, 1), 32),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_product(
    rows, row_scales, weights, weight_scales, order, ends, out, num_pairs,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: some outputs of some pairs that go to the same expert.

    Programs count through the blocks of each expert's pairs. Only the device knows how many these
    are, so each program finds its own expert. There may be more programs than blocks.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // parts
    e = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends + e, mask=e < E, other=0)
    begin_E = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    blocks_E = (end_E - begin_E + BLOCK_M - 1) // BLOCK_M
    until_E = tl.cumsum(blocks_E, 0)
    expert = tl.sum((until_E <= block).to(tl.int32), 0)
    if expert < E:
        is_mine = e == expert
        skipped = (block - until_E + blocks_E) * BLOCK_M
        m = tl.sum(tl.where(is_mine, begin_E + skipped, 0), 0) + tl.arange(0, BLOCK_M)
        live = m < tl.sum(tl.where(is_mine, end_E, 0), 0)
        pair = tl.load(order + m, mask=live, other=0)
        row = pair // EACH
        n = (tl.program_id(0) % parts) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        output = expert.to(tl.int64) * N + n
        row_at = rows + row[:, None] * K + k[None, :]
        weight_at = weights + output[None, :] * K + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            there = k < K - start
            x = tl.load(row_at + start, mask=live[:, None] & there[None, :], other=0.0)
            w = tl.load(weight_at + start, mask=there[:, None] & (n < N)[None, :], other=0.0)
            total = tl.dot(x, w, total)
        total *= tl.load(row_scales + row, mask=live, other=0.0)[:, None]
        total *= tl.load(weight_scales + output, mask=n < N, other=0.0)[None, :]
        tl.store(
            out + pair[:, None] * N + n[None, :], total.to(out.dtype.element_ty),
            mask=live[:, None] & (n < N)[None, :],
        )  # fmt: skip


def grouped_product(
    rows: Tensor,
    row_scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    order: Tensor,
    ends: Tensor,
    each: int,
    out: Tensor,
) -> None:
    """Fill out [S, N] as `treegen.model.linear.fp8_experts.grouped_product` says."""
    num_pairs, (experts, outputs, inputs) = len(order), weights.shape
    if not num_pairs:
        return
    # Most experts should have one block, so that each matrix is read once.
    block = min(max(triton.next_power_of_2(2 * num_pairs // experts), 16), 128)
    # Each expert has one block at most that is not full.
    blocks = num_pairs // block + min(experts, num_pairs)
    _grouped_product[(blocks * triton.cdiv(outputs, _OUTPUTS),)](
        rows.contiguous(), row_scales, weights, weight_scales, order, ends, out, num_pairs,
        E=experts, N=outputs, K=inputs, EACH=each, BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_M=block, BLOCK_N=_OUTPUTS, BLOCK_K=_INPUTS, num_warps=8 if block > 64 else 4,
        num_stages=3,
    )  # fmt: skip
