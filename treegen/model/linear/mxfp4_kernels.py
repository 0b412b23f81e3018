"""The Triton kernel that multiplies rows by MXFP4 experts, which it expands in registers.

As in `expert_kernels`, a program computes some outputs of one block of pairs, and the matrix is the
left operand. A byte holds two numbers: those in low halves are multiplied by the row's numbers at
even places, those in high halves by the odd ones, so nothing moves between threads.

Legend: E experts, S pairs of a row and an expert, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegen.model.linear.blocks import num_blocks, rows_of_block

BLOCK_N: Final = 128
BLOCK_K: Final = 128
"""Inputs per step. It does not depend on the number of rows, so that sums have one order."""

# Sign, exponent (2 bits) and mantissa (1 bit) are moved to these bits of a bfloat16, which is then
# 2^-126 times the number, also for 0 and 0.5. Both products after that are exact.
_EXPAND_TWO_BYTES: Final = """
    prmt.b32 two, $4, 0, {bytes};
    shl.b32 low, two, 4;
    shr.b32 bits, low, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 low, low, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 low, low, power, none;
    fma.rn.bf16x2 {low}, low, {factor}, none;
    shr.b32 bits, two, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 two, two, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 two, two, power, none;
    fma.rn.bf16x2 {high}, two, {factor}, none;"""
_EXPAND: tl.constexpr = tl.constexpr(
    """
{
    .reg .b32 two, low, bits, power, none;
    mov.b32 power, 0x7E807E80;
    mov.b32 none, 0x80008000;"""
    + _EXPAND_TWO_BYTES.format(bytes="0x1404", low="$0", high="$2", factor="$5")
    + _EXPAND_TWO_BYTES.format(bytes="0x3424", low="$1", high="$3", factor="$6")
    + "\n}\n"
)


@triton.jit
def _dequantize_bytes(bytes_NH, factor_NH):
    """Return the numbers in the low and the high halves of bytes, times a factor, in bfloat16."""
    return tl.inline_asm_elementwise(
        _EXPAND,
        "=&r,=&r,=&r,=&r,r,r,r",
        [bytes_NH, factor_NH],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["room"])
def _mxfp4_product(
    halves,
    weights,
    scales,
    bias,
    order,
    blocks,
    out,
    room,
    N: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute some outputs [BLOCK_N] of the pairs [ROWS] of a block in one program.

    Args:
        halves: Pointer to rows [S / EACH, 2, K / 2], numbers at even places first.
        weights: Pointer to packed weights, uint8 [E, N, K / 2].
        scales: Pointer to exponents of scales, uint8 [E, N, K / 32].
        bias: Pointer to the biases [E, N]; unused without HAS_BIAS.
        order: Pointer to the pair at each place [S].
        blocks: Pointer to expert, first place and end of each block [3, room].
        out: Pointer to the outputs of each pair [S, N].
        room: Places for blocks.
        N: The number of outputs.
        K: The number of inputs.
        EACH: Consecutive pairs that share a row.
        HAS_BIAS: Whether there are biases.
        ROWS: Maximum pairs of a block.
        BLOCK_N: Outputs per program.
        BLOCK_K: Inputs per step.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    H: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BLOCK_K // 32
    block = tl.program_id(0) // parts
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        m = tl.load(blocks + room + block) + tl.arange(0, ROWS)
        live_M = m < tl.load(blocks + 2 * room + block)
        pair = tl.load(order + m, mask=live_M, other=0).to(tl.int64)
        n = (tl.program_id(0) % parts) * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = n < N
        h, group = tl.arange(0, H), tl.arange(0, GROUPS)
        output = (expert * N + tl.where(live_N, n, 0))[:, None]
        weight_at = weights + output * (K // 2) + h[None, :]
        scale_at = scales + output * (K // 32) + group[None, :]
        even_at = halves + (pair // EACH)[None, :] * K + h[:, None]
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for start in range(0, K // 2, H):
            there = h < K // 2 - start
            w = tl.load(weight_at + start, mask=there[None, :], other=0)
            there_G = group < (K // 2 - start) // 16
            s = tl.load(scale_at + start // 16, mask=there_G[None, :], other=0)
            even = tl.load(even_at + start, mask=there[:, None], other=0.0)
            odd = tl.load(even_at + K // 2 + start, mask=there[:, None], other=0.0)
            # The exponent becomes a power of two; for exponent 0 it is half of that for 1.
            power = tl.where(s == 0, 0x40, s.to(tl.int16) << 7).to(tl.int16)
            power = power.to(tl.bfloat16, bitcast=True)[:, :, None]
            factor = tl.reshape(tl.broadcast_to(power, [BLOCK_N, GROUPS, 16]), [BLOCK_N, H])
            low, high = _dequantize_bytes(w, factor)
            total = tl.dot(low, even, total)
            total = tl.dot(high, odd, total)
        if HAS_BIAS:
            total += tl.load(bias + expert * N + n, mask=live_N, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out + pair[None, :] * N + n[:, None],
            total.to(out.dtype.element_ty),
            mask=live_M[None, :] & live_N[:, None],
        )


def choose_num_stages(rows: int, capability: tuple[int, int]) -> int:
    """Return the most pipeline stages that fit in shared memory for blocks of `rows` rows."""
    return 3 if capability >= (9, 0) or rows <= 64 else 2


def mxfp4_product(
    halves: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    order: Tensor,
    blocks: Tensor,
    each: int,
    out: Tensor,
) -> None:
    """Fill out [S, N] as documented in `treegen.model.linear.mxfp4.mxfp4_product`.

    Args:
        halves: Rows [S / each, 2, K / 2], numbers at even places first.
        weight: Packed weights, uint8 [E, N, K / 2].
        scale: Exponents of scales, uint8 [E, N, K / 32].
        bias: Biases [E, N]; None for none.
        order: int32 [S], the pairs sorted by expert.
        blocks: int32 [3, B], expert, first place and end of each block.
        each: Consecutive pairs that share a row.
        out: Outputs [S, N], dense; overwritten.
    """
    (num_pairs, outputs), experts = out.shape, len(weight)
    if not num_pairs:
        return
    size = rows_of_block(num_pairs, experts)
    # With four warps, blocks of 64 inputs and four stages, Triton 3.6 sets no barrier between
    # reading a step's bytes and copying the next step's, and sums were wrong.
    _mxfp4_product[(num_blocks(num_pairs, experts) * triton.cdiv(outputs, BLOCK_N),)](
        halves.contiguous(),
        weight,
        scale,
        bias,
        order,
        blocks,
        out,
        blocks.shape[1],
        N=outputs,
        K=halves[0].numel(),
        EACH=each,
        HAS_BIAS=bias is not None,
        ROWS=size,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=8,
        num_stages=choose_num_stages(size, torch.cuda.get_device_capability(halves.device)),
    )
