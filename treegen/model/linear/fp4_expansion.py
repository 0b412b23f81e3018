"""Products of many rows by matrices in 4 bits, which are expanded to bfloat16 first.

`fp4_kernels` expands a matrix again for each block of rows, which costs operations. Here it is
expanded once per product into scratch memory, which costs bytes: those of the matrix in 4 bits are
read, and 2 per number are written. Then cuBLAS multiplies one matrix, and `expert_kernels` those of
experts. The scratch memory comes from torch's allocator, so all layers of a pass, and all CUDA
graphs of a pool, share it.

Both ways multiply the same numbers exactly and apply factors to sums in float32, so they differ in
the order of sums alone.

Legend: E matrices, S pairs of a row and a matrix, M rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegen.model.linear import expert_kernels
from treegen.model.linear.experts import Routes
from treegen.model.linear.fp4_kernels import Matrices, add_parts
from treegen.model.linear.fp4_numbers import INTERPRETED, decode_scales, dequantize_words

# With R rows, a product takes 2 R N K operations at a share s of the device's rate F. Expanding
# moves 2.56 N K bytes at the rate B of its memory. Both ways take equally long for
#     R = 2.56 / 2 / (1 / s4 - 1 / s16) * F / B.
# One matrix: on an H200, s4 was up to 0.45, and s16 was 0.8 (docs/benchmarks/features.md).
_ROWS: Final = 1.3
# Experts: on an H100, 1 / s4 - 1 / s16 was 0.71 (steps of gpt-oss-20b, docs/performance.md).
_PAIRS: Final = 1.8
_FLOPS: Final = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
"""Operations in bfloat16 of a multiprocessor per clock, by compute capability."""
_DEFAULT_FLOPS: Final = 1024
_DEFAULT_BALANCE: Final = 200.0
_MAX_ROWS_AT_ONCE: Final = 1024  # maximum rows whose float32 sums are in memory together


@triton.jit
def _expand(
    weights,
    scales,
    out,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Expand some words of one output in one program.

    Args:
        weights: Pointer to packed weights, uint16 [E N, K / 4].
        scales: Pointer to scales, uint8 [E N, K / GROUP].
        out: Pointer to bfloat16 [E N, 4, K / 4].
        K: The number of inputs.
        GROUP: Inputs that share a scale.
        IS_E4M3: Whether scales are e4m3; else they are exponents of powers of two.
        BLOCK: Words per program.
    """
    output = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = word < K // 4
    w = tl.load(weights + output * (K // 4) + word, mask=mask, other=0)
    s = tl.load(scales + output * (K // GROUP) + word // (GROUP // 4), mask=mask, other=0)
    w0, w1, w2, w3 = dequantize_words(w, decode_scales(s, IS_E4M3), IS_E4M3)
    at = out + output * K + word
    tl.store(at, _unscale(w0, IS_E4M3), mask=mask)
    tl.store(at + K // 4, _unscale(w1, IS_E4M3), mask=mask)
    tl.store(at + K // 2, _unscale(w2, IS_E4M3), mask=mask)
    tl.store(at + 3 * (K // 4), _unscale(w3, IS_E4M3), mask=mask)


@triton.jit
def _unscale(numbers, IS_E4M3: tl.constexpr):
    """Return numbers as they are meant: those with scales in e4m3 are 2^126 / 2^119 too small."""
    if IS_E4M3:
        numbers = (numbers.to(tl.float32) * 128.0).to(tl.bfloat16)
    return numbers


def expand(weight: Tensor, scale: Tensor, is_e4m3: bool, out: Tensor) -> None:
    """Fill out [..., N, K] with numbers times their scales, inputs in the order of `split_rows`.

    Args:
        weight: Packed weights, uint8 [..., N, K / 2].
        scale: Scales, uint8 [..., N, groups].
        is_e4m3: Whether scales are e4m3; else they are exponents of powers of two.
        out: Expanded weights, bfloat16, dense; overwritten.
    """
    inputs = out.shape[-1]
    block = min(triton.next_power_of_2(inputs // 4), 1024)
    _expand[(out.numel() // inputs, triton.cdiv(inputs // 4, block))](
        weight.view(torch.uint16),
        scale,
        out,
        K=inputs,
        GROUP=inputs // scale.shape[-1],
        IS_E4M3=is_e4m3,
        BLOCK=block,
    )


def fp4_linear(quarters: Tensor, matrix: Matrices, out: Tensor) -> None:
    """Fill out [M, N] as `treegen.model.linear.fp4_kernels.fp4_linear` does.

    Args:
        quarters: Rows [M, 4, K / 4], as from `treegen.model.linear.fp4.split_rows`.
        matrix: The matrix, with scales in e4m3 and factors.
        out: Outputs [M, N], dense; overwritten.
    """
    weight, scale, factor, bias = matrix
    assert factor is not None
    rows = quarters.flatten(1)
    expanded = _scratch(rows, len(weight))
    expand(weight, scale, True, expanded)
    parts = zip(rows.split(_MAX_ROWS_AT_ONCE), out.split(_MAX_ROWS_AT_ONCE), strict=True)
    for part_rows, outputs in parts:
        add_parts(_multiply(part_rows, expanded)[None], factor, bias, outputs)


def grouped_fp4_product(quarters: Tensor, matrices: Matrices, routes: Routes, out: Tensor) -> None:
    """Fill out [S, N] as `treegen.model.linear.fp4_kernels.grouped_fp4_product` does.

    Args:
        quarters: Rows [M, 4, K / 4], as from `treegen.model.linear.fp4.split_rows`.
        matrices: The matrices of all experts.
        routes: The pairs sorted by expert, their blocks, and consecutive pairs that share a row.
        out: Outputs [S, N], dense; overwritten.
    """
    weight, scale, factor, bias = matrices
    rows = quarters.flatten(1)
    expanded = _scratch(rows, *weight.shape[:2])
    expand(weight, scale, factor is not None, expanded)
    row_factors = None if factor is None else factor.new_ones(len(rows))
    if INTERPRETED.value:  # the interpreter multiplies no bfloat16
        rows, expanded = rows.float(), expanded.float()
    expert_kernels.grouped_product(rows, row_factors, expanded, factor, bias, *routes, False, out)


def is_faster(num_rows: int, experts: int, device: torch.device) -> bool:
    """Return whether to expand a matrix, or those of all experts.

    Args:
        num_rows: The number of rows; with experts, of pairs of a row and an expert.
        experts: The number of experts; 0 for one matrix.
        device: The device.
    """
    if experts:
        return num_rows >= _PAIRS * _balance(device) * experts
    return num_rows >= _ROWS * _balance(device)


def scratch_bytes(outputs: int, inputs: int, experts: int) -> int:
    """Return the bytes that a product takes in addition to its rows and outputs.

    Args:
        outputs: The number of outputs of a matrix.
        inputs: Its number of inputs.
        experts: The number of experts; 0 for one matrix.
    """
    if experts:
        return 2 * experts * outputs * inputs
    return 2 * outputs * inputs + 4 * _MAX_ROWS_AT_ONCE * outputs


@cache
def _balance(device: torch.device) -> float:
    """Return how many operations in bfloat16 a device does while it moves a byte."""
    if INTERPRETED.value:
        return _DEFAULT_BALANCE
    properties = torch.cuda.get_device_properties(device)
    per_clock = _FLOPS.get((properties.major, properties.minor), _DEFAULT_FLOPS)
    flops = properties.multi_processor_count * per_clock * properties.clock_rate
    moved = 2 * properties.memory_clock_rate * properties.memory_bus_width / 8
    return flops / moved if moved else _DEFAULT_BALANCE


def _scratch(rows: Tensor, *shape: int) -> Tensor:
    return rows.new_empty((*shape, rows.shape[1]), dtype=torch.bfloat16)


def _multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows [M, K] times the transpose of a matrix [N, K] in float32."""
    if INTERPRETED.value:
        return rows.float() @ matrix.float().T
    return torch.mm(rows, matrix.T, out_dtype=torch.float32)
