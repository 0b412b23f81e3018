"""The Triton kernel that multiplies rows by matrices in 4 bits, which it expands in registers.

As in `expert_kernels`, a program computes some outputs of one block of rows, and the matrix is the
left operand. A word holds four numbers. The first numbers of all words are multiplied by every
fourth number of the row, from the first one on, and so on, so nothing moves between threads.

A number is e2m1, times a scale for each group of inputs: a power of two (MXFP4), or a number in
e4m3, whose products with e2m1 are exact in bfloat16, and a factor for each output at the end
(NVFP4). With one matrix and few outputs, several programs share the inputs of one product and a
second kernel adds their sums.

Legend: E matrices, S pairs of a row and a matrix, N outputs, K inputs, P parts of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegen.model.linear.blocks import num_blocks, rows_of_block
from treegen.model.linear.experts import Routes
from treegen.model.linear.fp4_numbers import INTERPRETED, decode_scales, dequantize_words


@triton.jit
def _add_product(a, b, total):
    """Return a @ b + total; Triton's interpreter multiplies no bfloat16."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["max_blocks", "num_rows"])
def _fp4_product(
    rows,
    weights,
    scales,
    factors,
    bias,
    order,
    blocks,
    out,
    max_blocks,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute some outputs [BLOCK_N] of the pairs [ROWS] of a block in one program.

    Args:
        rows: Pointer to rows [S / EACH, 4, K / 4]: every fourth number, from the first one on, then
            from the second, and so on.
        weights: Pointer to packed weights, uint16 [E, N, K / 4].
        scales: Pointer to scales, uint8 [E, N, K / GROUP].
        factors: Pointer to the factor of each output, float32 [E, N]; unused without IS_E4M3.
        bias: Pointer to the biases [E, N]; unused without HAS_BIAS.
        order: Pointer to the pairs sorted by expert [S]; unused with ONE.
        blocks: Pointer to expert, start and stop in the order of each block [3, max_blocks]; unused
            with ONE.
        out: Pointer to the outputs of each pair [S, N]; with APART to float32 sums [PARTS, S, N],
            without factors and biases.
        max_blocks: Maximum number of blocks.
        num_rows: The number of pairs, S.
        N: The number of outputs.
        K: The number of inputs.
        EACH: Consecutive pairs that share a row.
        GROUP: Inputs that share a scale.
        IS_E4M3: Whether scales are e4m3, with factors; else they are exponents of powers of two.
        HAS_BIAS: Whether there are biases.
        ONE: Whether there is one matrix, so that blocks are consecutive rows.
        PARTS: Parts of the inputs that are summed one by one.
        APART: Whether each part has its own program.
        ROWS: Maximum pairs of a block.
        BLOCK_N: Outputs per program.
        BLOCK_K: Inputs per step.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    W: tl.constexpr = BLOCK_K // 4
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    SHARE: tl.constexpr = (K // 4 + PARTS * W - 1) // (PARTS * W) * W  # words per part
    if ONE:
        # Programs that read one part of the matrix are neighbours.
        max_blocks = tl.cdiv(num_rows, ROWS)
        block, column = tl.program_id(0) % max_blocks, tl.program_id(0) // max_blocks
        expert = tl.zeros([], tl.int64)
    else:
        block, column = tl.program_id(0) // parts, tl.program_id(0) % parts
        expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        if ONE:
            m = block * ROWS + tl.arange(0, ROWS)
            mask_M = m < num_rows
            pair = tl.where(mask_M, m, 0).to(tl.int64)
        else:
            m = tl.load(blocks + max_blocks + block) + tl.arange(0, ROWS)
            mask_M = m < tl.load(blocks + 2 * max_blocks + block)
            pair = tl.load(order + m, mask=mask_M, other=0).to(tl.int64)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_N = n < N
        word, group = tl.arange(0, W), tl.arange(0, GROUPS)
        output = (expert * N + tl.where(mask_N, n, 0))[:, None]
        weight_at = weights + output * (K // 4) + word[None, :]
        scale_at = scales + output * (K // GROUP) + group[None, :]
        row_at = rows + (pair // EACH)[None, :] * K + word[:, None]
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
        begin = tl.program_id(1) if APART else 0
        for part in range(begin, begin + (1 if APART else PARTS)):
            first = part * SHARE
            end = tl.minimum(K // 4, first + SHARE)
            part_total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for start in range(first, end, W):
                in_bounds = word < end - start
                w = tl.load(weight_at + start, mask=in_bounds[None, :], other=0)
                mask_G = group < (end - start) // (GROUP // 4)
                s = tl.load(scale_at + start // (GROUP // 4), mask=mask_G[None, :], other=0)
                x0 = tl.load(row_at + start, mask=in_bounds[:, None], other=0.0)
                x1 = tl.load(row_at + K // 4 + start, mask=in_bounds[:, None], other=0.0)
                x2 = tl.load(row_at + K // 2 + start, mask=in_bounds[:, None], other=0.0)
                x3 = tl.load(row_at + 3 * (K // 4) + start, mask=in_bounds[:, None], other=0.0)
                factor = decode_scales(s, IS_E4M3)[:, :, None]
                factor = tl.reshape(
                    tl.broadcast_to(factor, [BLOCK_N, GROUPS, GROUP // 4]), [BLOCK_N, W]
                )
                w0, w1, w2, w3 = dequantize_words(w, factor, IS_E4M3)
                part_total = _add_product(w0, x0, part_total)
                part_total = _add_product(w1, x1, part_total)
                part_total = _add_product(w2, x2, part_total)
                part_total = _add_product(w3, x3, part_total)
            total = part_total if PARTS == 1 or APART else total + part_total
        at = pair[None, :] * N + n[:, None]
        mask = mask_M[None, :] & mask_N[:, None]
        if IS_E4M3:
            total *= 128.0  # 2^126 / 2^119
        if APART:
            tl.store(out + tl.program_id(1).to(tl.int64) * num_rows * N + at, total, mask=mask)
        else:
            if IS_E4M3:
                total *= tl.load(factors + expert * N + n, mask=mask_N, other=0.0)[:, None]
            if HAS_BIAS:
                added = tl.load(bias + expert * N + n, mask=mask_N, other=0.0)
                total += added.to(tl.float32)[:, None]
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_parts(
    sums,
    factors,
    bias,
    out,
    count,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of parts of the inputs, for some outputs of all rows.

    Args:
        sums: Pointer to float32 sums [PARTS, M, N].
        factors: Pointer to the factor of each output, float32 [N].
        bias: Pointer to the biases [N]; unused without HAS_BIAS.
        out: Pointer to the outputs [M, N].
        count: M x N.
        N: The number of outputs.
        HAS_BIAS: Whether there are biases.
        PARTS: The number of parts.
        BLOCK: Outputs per program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * count + at, mask=mask, other=0.0)
    total *= tl.load(factors + at % N, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


class Tiles(NamedTuple):
    """The division of a product among programs. All sizes are powers of two."""

    rows: int
    """Rows per program."""
    outputs: int = 128
    """Outputs per program."""
    inputs: int = 128
    """Inputs per step. Sums have one order as long as it does not depend on the number of rows."""
    warps: int = 8
    stages: int = 3
    """Pipeline stages."""
    parts: int = 1
    """Parts of the inputs that are summed one by one; for one matrix."""
    apart: bool = False
    """Whether each part has its own program, so that few outputs occupy the whole device."""


def choose_num_stages(rows: int, capability: tuple[int, int]) -> int:
    """Return the most pipeline stages that fit in shared memory for blocks of `rows` rows."""
    return 3 if capability >= (9, 0) or rows <= 64 else 2


def choose_tiles(rows: int, outputs: int, capability: tuple[int, int], processors: int) -> Tiles:
    """Return the tiles of a product of rows by one matrix.

    Args:
        rows: The number of rows.
        outputs: The number of outputs of the matrix.
        capability: The compute capability of the device.
        processors: The number of its multiprocessors.
    """
    size = min(max(triton.next_power_of_2(rows), 16), 128)
    parts = 1
    while parts < 8 and triton.cdiv(outputs, 128) * parts < 2 * processors:
        parts *= 2
    tiles = Tiles(size, stages=choose_num_stages(size, capability), parts=parts)
    if capability >= (9, 0):  # longer steps do not fit in the shared memory of earlier devices
        tiles = tiles._replace(inputs=256, stages=3 if size <= 64 else 2)
        if size == 16:
            tiles = tiles._replace(outputs=64, warps=4)
    programs = triton.cdiv(rows, size) * triton.cdiv(outputs, 128)
    return tiles._replace(apart=parts > 1 and programs < 2 * processors)


def grouped_tiles(rows: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of products of blocks of at most `rows` pairs."""
    outputs = 256 if capability >= (9, 0) else 128
    return Tiles(rows, outputs, stages=choose_num_stages(rows, capability))


Matrices = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Matrices in 4 bits: packed weights, uint8 [E, N, K / 2]; scales, uint8 [E, N, groups]; the factor
of each output, float32 [E, N], None if scales are powers of two; biases [E, N], None for none. One
matrix has no dimension E."""


def grouped_fp4_product(
    quarters: Tensor, matrices: Matrices, routes: Routes, out: Tensor, tiles: Tiles | None = None
) -> None:
    """Fill out [S, N] as documented in `treegen.model.linear.fp4.grouped_fp4_product`.

    Args:
        quarters: Rows [M, 4, K / 4], as from `treegen.model.linear.fp4.split_rows`.
        matrices: The matrices of all experts.
        routes: The pairs sorted by expert, their blocks, and consecutive pairs that share a row.
        out: Outputs [S, N], dense; overwritten.
        tiles: How to divide the product, with `rows_of_block` rows. Default: `grouped_tiles`.
    """
    num_pairs, experts = len(out), len(matrices[0])
    if not num_pairs:
        return
    size = rows_of_block(num_pairs, experts)
    if tiles is None:
        tiles = grouped_tiles(size, _capability(quarters))
    _launch(num_blocks(num_pairs, experts), tiles, quarters, matrices, routes, out)


def fp4_linear(quarters: Tensor, matrix: Matrices, out: Tensor, tiles: Tiles | None = None) -> None:
    """Fill out [M, N] with rows times the transpose of one matrix.

    Args:
        quarters: Rows [M, 4, K / 4], as from `treegen.model.linear.fp4.split_rows`.
        matrix: The matrix, with scales in e4m3 and factors.
        out: Outputs [M, N], dense; overwritten.
        tiles: How to divide the product. Default: `choose_tiles`.
    """
    rows, outputs = out.shape
    if not rows:
        return
    if tiles is None:
        tiles = choose_tiles(rows, outputs, _capability(quarters), _processors(quarters))
    sums = out
    if tiles.apart:
        sums = out.new_empty((tiles.parts, rows, outputs), dtype=torch.float32)
    weight, scale, factor, bias = matrix
    matrices = weight[None], scale[None], factor, bias
    _launch(triton.cdiv(rows, tiles.rows), tiles, quarters, matrices, None, sums)
    if tiles.apart:
        assert factor is not None
        add_parts(sums, factor, bias, out)


def add_parts(sums: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill out [M, N] with the sums of parts of the inputs, times factors, plus biases.

    Args:
        sums: Float32 sums [P, M, N].
        factor: The factor of each output, float32 [N].
        bias: Biases [N]; None for none.
        out: Outputs [M, N], dense; overwritten.
    """
    block, (parts, rows, outputs) = 1024, sums.shape
    _add_parts[(triton.cdiv(rows * outputs, block),)](
        sums,
        factor,
        factor if bias is None else bias,
        out,
        rows * outputs,
        N=outputs,
        HAS_BIAS=bias is not None,
        PARTS=parts,
        BLOCK=block,
    )


def _launch(
    num_blocks: int,
    tiles: Tiles,
    quarters: Tensor,
    matrices: Matrices,
    routes: Routes | None,
    out: Tensor,
) -> None:
    """Launch the kernel; see `grouped_fp4_product`.

    Args:
        num_blocks: Blocks of rows.
        tiles: How to divide the product.
        quarters: Rows.
        matrices: Packed weights, scales, factors and biases.
        routes: Sorted pairs, their blocks, and pairs that share a row; None for one matrix.
        out: Outputs, or the sums of parts of the inputs.
    """
    weight, scale, factor, bias = matrices
    order, blocks, pairs_per_row = (None, None, 1) if routes is None else routes
    outputs, inputs = weight.shape[1], quarters[0].numel()
    # With four warps, blocks of 64 inputs and four stages, Triton 3.6 sets no barrier between
    # reading a step's bytes and copying the next step's, and sums were wrong.
    _fp4_product[
        (num_blocks * triton.cdiv(outputs, tiles.outputs), tiles.parts if tiles.apart else 1)
    ](
        quarters.contiguous(),
        weight.view(torch.uint16),
        scale,
        scale if factor is None else factor,
        scale if bias is None else bias,
        order,
        blocks,
        out,
        0 if blocks is None else blocks.shape[1],
        out.shape[-2],
        N=outputs,
        K=inputs,
        EACH=pairs_per_row,
        GROUP=inputs // scale.shape[-1],
        IS_E4M3=factor is not None,
        HAS_BIAS=bias is not None,
        ONE=blocks is None,
        **constants_of(tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def constants_of(tiles: Tiles) -> dict[str, int]:
    """Return the constants of the kernel that the tiles decide."""
    return {
        "PARTS": tiles.parts,
        "APART": tiles.apart,
        "ROWS": tiles.rows,
        "BLOCK_N": tiles.outputs,
        "BLOCK_K": tiles.inputs,
    }


def _capability(tensor: Tensor) -> tuple[int, int]:
    if INTERPRETED.value:
        return 9, 0
    return torch.cuda.get_device_capability(tensor.device)


def _processors(tensor: Tensor) -> int:
    if INTERPRETED.value:
        return 4
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
