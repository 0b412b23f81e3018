"""Triton kernels: attention of blocks of query rows to runs of paged keys, merge, and writes.

Legend: T query rows, H query heads, G key heads, D or K key dimension, V value dimension, P parts
to merge, C chunks of the dense part, R its rows. LSEs are in base 2 inside of kernels and natural
in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treegen.ops.attention.gpu.kernel_steps import (
    LOG2E,
    load_block,
    reach_of,
    rows_of,
    seen_by,
    slots_of,
    store_rows,
    unit_of,
)

# Counts have no code of their own for 1 or multiples of 16, nor lists for where they start: each
# would be compiled, in the middle of a run, when it first comes.
COUNTS = ("num_units", "num_rows", "dense_rows", "num_chunks")
LISTS = ("pages", "units", "positions", "slots")


@triton.jit
def _add_part(top, total, sum_MV, lse, part_MV):
    """Add a partial result to a running softmax: its weight is exp2 of its LSE."""
    new_top = tl.maximum(top, lse)
    floor = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, weight = tl.exp2(top - floor), tl.exp2(lse - floor)
    return new_top, total * keep + weight, sum_MV * keep[:, None] + part_MV * weight[:, None]


@triton.jit
def merge_partials(
    row,
    head,
    live,
    parts,
    part_lses,
    num_parts,
    dense,
    dense_lses,
    num_rows,
    dense_rows,
    num_chunks,
    BLOCK_M: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FOLD: tl.constexpr,
):
    """The running softmax of M rows over the first parts and what is dense (Hydragen, eq. 5).

    parts [P, T, H, V] and their LSEs [P, T, H] are float32. dense [C, R, FOLD, H / FOLD, V] has
    the type of the queries, its LSEs are [C, H / FOLD, R, FOLD]: the second of FOLD heads is a row.
    """
    e = tl.arange(0, BLOCK_V)
    there_MV = live[:, None] & (e < V)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    size = num_rows.to(tl.int64) * H
    at = row.to(tl.int64) * H + head
    for p in range(num_parts):
        lse = tl.load(part_lses + p * size + at, mask=live, other=float("-inf")) * LOG2E
        part_MV = tl.load(
            parts + (p * size + at)[:, None] * V + e[None, :], mask=there_MV, other=0.0
        )
        # Where the LSE is -inf, the part was perhaps not written.
        part_MV = tl.where((lse > float("-inf"))[:, None], part_MV, 0.0)
        top, total, sum_MV = _add_part(top, total, sum_MV, lse, part_MV)
    dense_size = dense_rows.to(tl.int64) * H
    dense_at = row.to(tl.int64) * H + head % FOLD * (H // FOLD) + head // FOLD
    lse_at = (head // FOLD * dense_rows + row) * FOLD + head % FOLD
    for c in range(num_chunks):
        lse = tl.load(dense_lses + c * dense_size + lse_at, mask=live, other=float("-inf")) * LOG2E
        part_MV = tl.load(
            dense + (c * dense_size + dense_at)[:, None] * V + e[None, :], mask=there_MV, other=0.0
        ).to(tl.float32)
        top, total, sum_MV = _add_part(top, total, sum_MV, lse, part_MV)
    return top, total, sum_MV


@triton.jit
def store_merged(
    top,
    total,
    sum_MV,
    row,
    head,
    live,
    sinks,
    out,
    lses,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write out [T, H, V] and lses [T, H] of M rows; sinks [H] take their share of the softmax."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32) * LOG2E
        top, total, sum_MV = _add_part(top, total, sum_MV, sink, tl.zeros_like(sum_MV))
    store_rows(top, total, sum_MV, row, head, live, out, lses, H, V, BLOCK_V)


@triton.jit
def store_part(
    top,
    total,
    sum_MV,
    part,
    row,
    head,
    live,
    parts,
    part_lses,
    num_rows,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the running softmax of M rows to one of parts [P, T, H, V] and part_lses [P, T, H]."""
    e = tl.arange(0, BLOCK_V)
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    at = (part * num_rows.to(tl.int64) + row) * H + head
    tl.store(
        parts + at[:, None] * V + e[None, :],
        sum_MV / divisor[:, None],
        mask=live[:, None] & (e < V)[None, :],
    )
    lse = tl.where(some, (top + tl.log2(divisor)) / LOG2E, float("-inf"))
    tl.store(part_lses + at, lse, mask=live)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=LISTS)
def attend_units(
    q,
    k,
    v,
    pages,
    units,
    positions,
    parts,
    part_lses,
    dense,
    dense_lses,
    sinks,
    out,
    lses,
    scale,
    window,
    softcap,
    q_row,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    num_units,
    num_rows,
    dense_rows,
    num_chunks,
    H: tl.constexpr,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LAST: tl.constexpr,
    LATENT: tl.constexpr,
):
    """One program: one unit of the work list and one key head.

    A unit is (part, first row, stop row, offset of its page table, first key, stop key, position
    of key 0, causal, page of the first key); its first key is a multiple of BLOCK_N. The query
    heads of a key head are folded into rows, so a key is read once for all of them. Writes its part
    of parts [P, T, H, V] and part_lses [P, T, H] in float32. LAST: merges (Hydragen, eq. 5) with
    what is dense and with the first parts, as many as the unit's first number says, and writes out
    [T, H, V] and lses [T, H].

    Args:
        LATENT: K and v are the same pool of D = V + P numbers, V of a latent and P rotated ones
            behind it. A latent is read once, for logits and for results. The rotated numbers are a
            block of their own, BLOCK_D wide, so no block is wider than it must be.
    """
    # What is loaded from where something else was loaded waits twice: few steps of that.
    unit, head = unit_of(units, num_units, H, PER_HEAD, LAST)
    start, stop = tl.load(unit + 1), tl.load(unit + 2)
    table = pages + tl.load(unit + 3)
    low, high, page = tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 8)
    if start >= stop:
        return

    if LATENT:
        row, q_at, live, q_MD = rows_of(
            q, start, stop, head, q_row, q_head, PER_HEAD, V, BLOCK_V, BLOCK_M
        )
        _, _, _, q_MP = rows_of(
            q + V, start, stop, head, q_row, q_head, PER_HEAD, D - V, BLOCK_D, BLOCK_M
        )
    else:
        row, q_at, live, q_MD = rows_of(
            q, start, stop, head, q_row, q_head, PER_HEAD, D, BLOCK_D, BLOCK_M
        )
        if BLOCK_M == 1:
            q_D = tl.sum(q_MD.to(tl.float32), 0)
    newest, oldest, low, high = reach_of(
        unit, positions, row, live, low, high, window, BLOCK_M, BLOCK_N, HAS_POSITIONS, HAS_WINDOW
    )
    if HAS_WINDOW:
        page = tl.load(table + low // PAGE, mask=low < high, other=0)

    part = tl.load(unit)
    if LAST:
        # First, while the queries are on their way: at the end nothing else would be.
        top, total, sum_MV = merge_partials(
            row,
            q_at,
            live,
            parts,
            part_lses,
            part,
            dense,
            dense_lses,
            num_rows,
            dense_rows,
            num_chunks,
            BLOCK_M,
            H,
            V,
            BLOCK_V,
            FOLD,
        )
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(low, high, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < high
        slot, page = slots_of(table, page, first, n, there, high, PAGE, BLOCK_N)
        # Keys and values may be stored in FP8.
        if LATENT:
            k_ND = load_block(k, slot, there, head, k_slot, k_head, V, BLOCK_V).to(q_MD.dtype)
            r_NP = load_block(k + V, slot, there, head, k_slot, k_head, D - V, BLOCK_D)
            logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
            rotated = tl.trans(r_NP.to(q_MD.dtype))
            logit = tl.dot(q_MP, rotated, logit, input_precision="ieee") * scale
        else:
            k_ND = load_block(k, slot, there, head, k_slot, k_head, D, BLOCK_D).to(q_MD.dtype)
            if BLOCK_M == 1:
                logit = tl.sum(k_ND.to(tl.float32) * q_D[None, :], 1)[None, :] * scale
            else:
                logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        if HAS_CAP:
            # tanh through exp, which does not overflow for large arguments of either sign.
            bend = tl.exp2(tl.abs(logit) * (-2 * LOG2E) / softcap)
            sign = tl.where(logit < 0, -1.0, 1.0)
            logit = sign * softcap * ((1 - bend) / (1 + bend))
        seen = seen_by(n, there, newest, oldest, HAS_POSITIONS, HAS_WINDOW)
        logit = tl.where(seen, logit * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - floor[:, None])
        keep = tl.exp2(top - floor)
        if LATENT:
            v_NV = k_ND
        else:
            v_NV = load_block(v, slot, there, head, v_slot, v_head, V, BLOCK_V).to(q_MD.dtype)
        total = total * keep + tl.sum(weight, 1)
        sum_MV = sum_MV * keep[:, None]
        if BLOCK_M == 1:
            sum_MV += tl.sum(tl.sum(weight, 0)[:, None] * v_NV.to(tl.float32), 0)[None, :]
        else:
            sum_MV += tl.dot(weight.to(v_NV.dtype), v_NV, input_precision="ieee")
        top = new_top

    if LAST:
        store_merged(
            top, total, sum_MV, row, q_at, live, sinks, out, lses, H, V, BLOCK_V, HAS_SINKS
        )
    else:
        store_part(
            top, total, sum_MV, part, row, q_at, live, parts, part_lses, num_rows, H, V, BLOCK_V
        )


@triton.jit(do_not_specialize=(*COUNTS[1:], "num_parts"))
def merge_parts(
    parts,
    part_lses,
    dense,
    dense_lses,
    sinks,
    out,
    lses,
    num_rows,
    dense_rows,
    num_chunks,
    num_parts,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: BLOCK_M pairs of a row and a head, merged from all parts and what is dense."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = pair // H, pair % H
    live = row < num_rows
    top, total, sum_MV = merge_partials(
        row,
        head,
        live,
        parts,
        part_lses,
        num_parts,
        dense,
        dense_lses,
        num_rows,
        dense_rows,
        num_chunks,
        BLOCK_M,
        H,
        V,
        BLOCK_V,
        FOLD,
    )
    store_merged(top, total, sum_MV, row, head, live, sinks, out, lses, H, V, BLOCK_V, HAS_SINKS)


@triton.jit(do_not_specialize_on_alignment=LISTS)
def write_slots(
    k,
    v,
    keys,
    values,
    slots,
    k_row,
    k_head,
    v_row,
    v_head,
    k_slot,
    g_keys,
    v_slot,
    g_values,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROOM_G: tl.constexpr,
    ROOM_K: tl.constexpr,
    ROOM_V: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program: one token's keys and values, all heads. MOST: their bound, 0 for none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    g = tl.arange(0, ROOM_G)[:, None]
    d = tl.arange(0, ROOM_K)[None, :]
    e = tl.arange(0, ROOM_V)[None, :]
    k_GK = tl.load(k + row * k_row + g * k_head + d, mask=(g < G) & (d < K))
    v_GV = tl.load(v + row * v_row + g * v_head + e, mask=(g < G) & (e < V))
    if MOST > 0:
        k_GK = tl.minimum(tl.maximum(k_GK.to(tl.float32), -MOST), MOST).to(keys.dtype.element_ty)
        v_GV = tl.minimum(tl.maximum(v_GV.to(tl.float32), -MOST), MOST).to(values.dtype.element_ty)
    tl.store(keys + slot * k_slot + g * g_keys + d, k_GK, mask=(g < G) & (d < K))
    tl.store(values + slot * v_slot + g * g_values + e, v_GV, mask=(g < G) & (e < V))
