"""A Triton kernel that computes and rounds the input of a gated FP8 layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PER_WARP = 512  # numbers of a row per warp


@triton.jit(do_not_specialize=["rows"])
def _silu_quantize(
    gate_up, rounded, scales, rows, most, least, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Round one row of silu(gate) * up to FP8 and write its scale.

    Args:
        gate_up: Pointer to gates and ups [rows, 2 F].
        rounded: Pointer to the FP8 result [rows, F].
        scales: Pointer to the scale of each row [rows].
        rows: The number of rows.
        most: The largest FP8 number.
        least: The minimum of a row's largest number, so that a row of zeros is not divided by zero.
        F: The width of a row.
        BLOCK: F rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=live, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    largest = tl.maximum(tl.max(tl.abs(product), 0), least)
    # Divide once per row, because the kernel is bound by arithmetic, not by memory.
    within = tl.minimum(tl.maximum(product * (most / largest), -most), most)
    tl.store(rounded + row * F + at, within.to(rounded.dtype.element_ty), mask=live)
    tl.store(scales + row, largest / most)


def silu_quantize(
    gate_up: Tensor, rounded: Tensor, scales: Tensor, most: float, least: float
) -> None:
    """Fill rounded [rows, F] and scales [rows] from gate_up [rows, 2 F].

    Args:
        gate_up: Gates and ups [rows, 2 F], dense.
        rounded: FP8 [rows, F]; overwritten.
        scales: Float32 [rows], the scale of each row; overwritten.
        most: The largest FP8 number.
        least: The minimum of a row's largest number, so that a row of zeros is not divided by zero.
    """
    rows, width = rounded.shape
    if rows:
        block = triton.next_power_of_2(width)
        _silu_quantize[(rows,)](
            gate_up,
            rounded,
            scales,
            rows,
            most,
            least,
            F=width,
            BLOCK=block,
            num_warps=min(max(block // _PER_WARP, 1), 32),
        )
