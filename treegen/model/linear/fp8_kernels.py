"""A Triton kernel for FP8: the input of a gated layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PER_WARP = 512  # numbers of a row that a warp holds


@triton.jit(do_not_specialize=["rows"])
def _silu_quantize(
    gate_up, rounded, scales, rows, most, least, F: tl.constexpr, BLOCK: tl.constexpr
):
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
