"""Triton kernels of attention to latents: one key for all heads, whose first numbers are its value.

A block of latents is read once, for logits and for results. The rotated numbers behind it are a
block of their own, so no block is wider than it must be. A row's heads are the rows of one product.

Legend: M rows of a program, each a query row and a head, N keys of a block, T query rows, H query
heads, D = V + P numbers of a key: V of a latent, P rotated ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treegen.attention.gpu.kernel_steps import (
    LOG2E,
    load_block,
    reach_of,
    rows_of,
    seen_by,
    slots_of,
    unit_of,
)
from treegen.attention.gpu.kernels import COUNTS, LISTS, merged, store_merged, store_part


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=LISTS)
def latent_units(
    q, k, v, pages, units, positions,
    parts, part_lses, dense, dense_lses, sinks, out, lses,
    scale, window, softcap,
    q_row, q_head, k_slot, k_head, v_slot, v_head, num_units,
    num_rows, dense_rows, num_chunks,
    H: tl.constexpr, PER_HEAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One program: one unit of the work list and PER_HEAD heads, as `attend_units` for other keys.

    k and v are the same pool. BLOCK_D: has the rotated numbers.
    """
    unit, head = unit_of(units, num_units, H, PER_HEAD, LAST)
    start, stop = tl.load(unit + 1), tl.load(unit + 2)
    table = pages + tl.load(unit + 3)
    low, high, page = tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 8)
    if start >= stop:
        return

    row, q_at, live, q_MV = rows_of(
        q, start, stop, head, q_row, q_head, PER_HEAD, V, BLOCK_V, BLOCK_M
    )
    _, _, _, q_MP = rows_of(
        q + V, start, stop, head, q_row, q_head, PER_HEAD, D - V, BLOCK_D, BLOCK_M
    )
    newest, oldest, low, high = reach_of(
        unit, positions, row, live, low, high, window, BLOCK_M, BLOCK_N, HAS_POSITIONS, HAS_WINDOW
    )
    if HAS_WINDOW:
        page = tl.load(table + low // PAGE, mask=low < high, other=0)

    part = tl.load(unit)
    if LAST:
        top, total, sum_MV = merged(
            row, q_at, live, parts, part_lses, part, dense, dense_lses, num_rows, dense_rows,
            num_chunks, BLOCK_M, H, V, BLOCK_V, FOLD,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(low, high, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < high
        slot, page = slots_of(table, page, first, n, there, high, PAGE, BLOCK_N)
        c_NV = load_block(k, slot, there, head, k_slot, k_head, V, BLOCK_V).to(q_MV.dtype)
        r_NP = load_block(k + V, slot, there, head, k_slot, k_head, D - V, BLOCK_D).to(q_MV.dtype)
        logit = tl.dot(q_MV, tl.trans(c_NV), input_precision="ieee")
        logit = tl.dot(q_MP, tl.trans(r_NP), logit, input_precision="ieee") * scale
        if HAS_CAP:
            bend = tl.exp2(tl.abs(logit) * (-2 * LOG2E) / softcap)
            sign = tl.where(logit < 0, -1.0, 1.0)
            logit = sign * softcap * ((1 - bend) / (1 + bend))
        seen = seen_by(n, there, newest, oldest, HAS_POSITIONS, HAS_WINDOW)
        logit = tl.where(seen, logit * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - floor[:, None])
        keep = tl.exp2(top - floor)
        total = total * keep + tl.sum(weight, 1)
        sum_MV = sum_MV * keep[:, None]
        sum_MV = tl.dot(weight.to(c_NV.dtype), c_NV, sum_MV, input_precision="ieee")
        top = new_top

    if LAST:
        store_merged(
            top, total, sum_MV, row, q_at, live, sinks, out, lses, H, V, BLOCK_V, HAS_SINKS
        )
    else:
        store_part(
            top, total, sum_MV, part, row, q_at, live, parts, part_lses, num_rows, H, V, BLOCK_V
        )


@triton.jit(do_not_specialize=("num_pairs",))
def merge_two(
    a, a_lses, b, b_lses, out, a_row, a_head, b_row, b_head, num_pairs,
    H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M pairs of a row and a head of two results, [T, H, V] with LSEs [T, H]."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = pair < num_pairs
    row, head = pair // H, pair % H
    e = tl.arange(0, BLOCK_V)
    there = live[:, None] & (e < V)[None, :]
    a_lse = tl.load(a_lses + pair, mask=live, other=float("-inf"))
    b_lse = tl.load(b_lses + pair, mask=live, other=float("-inf"))
    top = tl.maximum(a_lse, b_lse)
    floor = tl.where(top == float("-inf"), 0.0, top)
    a_part, b_part = tl.exp(a_lse - floor), tl.exp(b_lse - floor)
    total = a_part + b_part
    divisor = tl.where(total > 0, total, 1.0)
    a_MV = tl.load(
        a + (row * a_row + head * a_head)[:, None] + e[None, :],
        mask=there & (a_part > 0)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    b_MV = tl.load(
        b + (row * b_row + head * b_head)[:, None] + e[None, :],
        mask=there & (b_part > 0)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    sum_MV = a_MV * (a_part / divisor)[:, None] + b_MV * (b_part / divisor)[:, None]
    tl.store(out + pair[:, None] * V + e[None, :], sum_MV.to(out.dtype.element_ty), mask=there)
