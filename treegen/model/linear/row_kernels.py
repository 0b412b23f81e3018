"""Triton kernels over rows: a product with one order of sums, the input of a gated layer, top k."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS: Final = 64  # outputs per program
_ROWS: Final = 64  # rows per program
_INPUTS: Final = 64  # inputs summed at once


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_linear(
    rows,
    weight,
    bias,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute some outputs [BLOCK_N] of some rows [BLOCK_M] in one program.

    The matrix is the left operand, because tensor cores take 64 outputs at once even for few rows.

    Args:
        rows: Pointer to inputs [num_rows, K].
        weight: Pointer to the weight [N, K].
        bias: Pointer to the bias [N]; unused without HAS_BIAS.
        out: Pointer to outputs [num_rows, N].
        num_rows: The number of rows.
        N: The number of outputs.
        K: The number of inputs.
        HAS_BIAS: Whether there is a bias.
        PRECISION: The input precision of `tl.dot`.
        BLOCK_M: Rows per program.
        BLOCK_N: Outputs per program.
        BLOCK_K: Inputs per step.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask_M, mask_N = m < num_rows, n < N
    row_at = rows + m.to(tl.int64)[None, :] * K + k[:, None]
    weight_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        in_bounds = k < K - start
        w = tl.load(weight_at + start, mask=mask_N[:, None] & in_bounds[None, :], other=0.0)
        x = tl.load(row_at + start, mask=mask_M[None, :] & in_bounds[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=mask_N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + m.to(tl.int64)[None, :] * N + n[:, None],
        total.to(out.dtype.element_ty),
        mask=mask_M[None, :] & mask_N[:, None],
    )


def fixed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill out [M, N] with rows [M, K] times the transpose of weight [N, K], plus bias [N].

    Args:
        rows: Inputs [M, K].
        weight: Weight [N, K].
        bias: Bias [N]; None for none.
        out: Outputs [M, N], dense; overwritten.
    """
    (num_rows, outputs), inputs = out.shape, weight.shape[1]
    if not num_rows:
        return
    # Three TF32 products are as exact as a float32 product and ten times as fast.
    precision = "tf32x3" if rows.dtype == torch.float32 else "tf32"
    _fixed_linear[(triton.cdiv(num_rows, _ROWS), triton.cdiv(outputs, _OUTPUTS))](
        rows.contiguous(),
        weight.contiguous(),
        weight if bias is None else bias,
        out,
        num_rows,
        N=outputs,
        K=inputs,
        HAS_BIAS=bias is not None,
        PRECISION=precision,
        BLOCK_M=_ROWS,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=_INPUTS,
        num_warps=4,
        num_stages=3,
    )


_PER_WARP = 512  # numbers of a row per warp


@triton.jit(do_not_specialize=["rows"])
def _silu_quantize(
    gate_up, rounded, scales, rows, fp8_max, min_amax, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Round one row of silu(gate) * up to FP8 and write its scale.

    Args:
        gate_up: Pointer to gates and ups [rows, 2 F].
        rounded: Pointer to the FP8 result [rows, F].
        scales: Pointer to the scale of each row [rows].
        rows: The number of rows.
        fp8_max: The largest FP8 number.
        min_amax: The minimum of a row's largest number: a row of zeros is not divided by zero.
        F: The width of a row.
        BLOCK: F rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    largest = tl.maximum(tl.max(tl.abs(product), 0), min_amax)
    # Divide once per row, because the kernel is bound by arithmetic, not by memory.
    within = tl.minimum(tl.maximum(product * (fp8_max / largest), -fp8_max), fp8_max)
    tl.store(rounded + row * F + at, within.to(rounded.dtype.element_ty), mask=mask)
    tl.store(scales + row, largest / fp8_max)


def silu_quantize(
    gate_up: Tensor, rounded: Tensor, scales: Tensor, fp8_max: float, min_amax: float
) -> None:
    """Fill rounded [rows, F] and scales [rows] from gate_up [rows, 2 F].

    Args:
        gate_up: Gates and ups [rows, 2 F], dense.
        rounded: FP8 [rows, F]; overwritten.
        scales: Float32 [rows], the scale of each row; overwritten.
        fp8_max: The largest FP8 number.
        min_amax: The minimum of a row's largest number: a row of zeros is not divided by zero.
    """
    rows, width = rounded.shape
    if rows:
        block = triton.next_power_of_2(width)
        _silu_quantize[(rows,)](
            gate_up,
            rounded,
            scales,
            rows,
            fp8_max,
            min_amax,
            F=width,
            BLOCK=block,
            num_warps=min(max(block // _PER_WARP, 1), 32),
        )


_SHORT_ROWS: Final = 4  # rows per program


@triton.jit(do_not_specialize=["num_rows"])
def _largest(
    scores,
    values,
    indices,
    num_rows,
    E: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the NUM largest scores of some rows, by taking the largest remaining score NUM times.

    Args:
        scores: Pointer to scores [num_rows, E].
        values: Pointer to the largest scores [num_rows, NUM]; written.
        indices: Pointer to their indices, int64 [num_rows, NUM]; written.
        num_rows: The number of rows.
        E: Scores per row.
        NUM: Scores to find.
        BLOCK_E: E rounded up to a power of two.
        ROWS: Rows per program.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live_R = row < num_rows
    e = tl.arange(0, BLOCK_E)
    is_score = live_R[:, None] & (e < E)[None, :]
    x_RE = tl.load(scores + row[:, None] * E + e[None, :], mask=is_score, other=0.0).to(tl.float32)
    x_RE = tl.where(x_RE != x_RE, float("inf"), x_RE)
    left_RE = (e < E)[None, :] & (row >= 0)[:, None]
    for index in tl.static_range(NUM):
        best_R = tl.max(tl.where(left_RE, x_RE, -float("inf")), 1)
        at_R = tl.min(tl.where(left_RE & (x_RE == best_R[:, None]), e[None, :], BLOCK_E), 1)
        value_R = tl.load(scores + row * E + at_R, mask=live_R, other=0.0)
        tl.store(values + row * NUM + index, value_R, mask=live_R)
        tl.store(indices + row * NUM + index, at_R.to(tl.int64), mask=live_R)
        left_RE = left_RE & (e[None, :] != at_R[:, None])


def largest(scores: Tensor, values: Tensor, indices: Tensor) -> None:
    """Fill values and indices as documented in `treegen.model.graph_passes.topk_rows`.

    Args:
        scores: Scores [..., E].
        values: The largest scores [..., num], dense; overwritten.
        indices: Their indices, int64 [..., num], dense; overwritten.
    """
    width, num = scores.shape[-1], values.shape[-1]
    num_rows = values.numel() // num
    if num_rows:
        _largest[(triton.cdiv(num_rows, _SHORT_ROWS),)](
            scores.contiguous(),
            values,
            indices,
            num_rows,
            E=width,
            NUM=num,
            BLOCK_E=triton.next_power_of_2(width),
            ROWS=_SHORT_ROWS,
        )
