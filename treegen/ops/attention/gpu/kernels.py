"""Triton kernels for attention of blocks of query rows to runs of paged keys, merging and writing.

Legend: T query rows, H query heads, G key heads, D or K key dimension, V value dimension, M folded
rows of a program (a query row and a head each), U units, P parts to merge, C chunks of the dense
part, R its rows. LSEs are in base 2 inside kernels and natural in memory. Strides are in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treegen.ops.attention.gpu.kernel_steps import (
    LOG2E,
    add_part,
    cap_logits,
    load_block,
    reach_of,
    rows_of,
    seen_by,
    slots_of,
    store_rows,
    unit_of,
)

# Triton must not specialize on these counts (for 1 or multiples of 16) or on the alignment of these
# lists: each new case would be compiled in the middle of a run.
COUNTS = ("num_units", "num_rows", "dense_rows", "num_chunks")
LISTS = ("pages", "units", "positions", "slots")


@triton.jit
def merge_partials(
    row,
    head,
    mask,
    written,
    dense_part,
    num_rows,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FOLD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the running softmax of M rows over parts and dense chunks (Hydragen, eq. 5).

    Args:
        row: Query row of each folded row [M].
        head: Query head of each folded row [M].
        mask: Which folded rows to load [M].
        written: Pointer to the parts [P, T, H, V], float32, pointer to their LSEs [P, T, H],
            float32, and the number of parts to merge, from the first.
        dense_part: Pointer to the dense chunks [C, R, FOLD, H / FOLD, V], in the type of the
            queries, pointer to their LSEs [C, H / FOLD, R, FOLD], float32, R and C.
        num_rows: T, the number of query rows.
        H: Query heads.
        V: Value dimension.
        BLOCK_V: Width of the block that holds a value.
        FOLD: Query heads that the dense kernel folded into rows.
        STAGES: Number of parts, or chunks, that are loaded at the same time.

    Returns:
        Maximum in base 2 [M], sum of weights [M], and weighted sum of results [M, V].
    """
    parts, part_lses, num_parts = written
    dense, dense_lses, dense_rows, num_chunks = dense_part
    BLOCK_M: tl.constexpr = row.shape[0]
    e = tl.arange(0, BLOCK_V)
    mask_MV = mask[:, None] & (e < V)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    size = num_rows.to(tl.int64) * H
    at = row.to(tl.int64) * H + head
    for p in tl.range(0, num_parts, num_stages=STAGES):
        lse = tl.load(part_lses + p * size + at, mask=mask, other=float("-inf")) * LOG2E
        part_MV = tl.load(
            parts + (p * size + at)[:, None] * V + e[None, :], mask=mask_MV, other=0.0
        )
        # A part with the LSE -inf may not have been written.
        part_MV = tl.where((lse > float("-inf"))[:, None], part_MV, 0.0).to(tl.float32)
        top, total, sum_MV = add_part(top, total, sum_MV, lse, 1.0, part_MV)
    dense_size = dense_rows.to(tl.int64) * H
    dense_at = row.to(tl.int64) * H + head % FOLD * (H // FOLD) + head // FOLD
    lse_at = (head // FOLD * dense_rows + row) * FOLD + head % FOLD
    for c in tl.range(0, num_chunks, num_stages=STAGES):
        lse = tl.load(dense_lses + c * dense_size + lse_at, mask=mask, other=float("-inf")) * LOG2E
        part_MV = tl.load(
            dense + (c * dense_size + dense_at)[:, None] * V + e[None, :], mask=mask_MV, other=0.0
        ).to(tl.float32)
        top, total, sum_MV = add_part(top, total, sum_MV, lse, 1.0, part_MV)
    return top, total, sum_MV


@triton.jit
def _add_sinks(top, total, sum_MV, sinks, head, mask):
    """Add the sinks [H] of each row's head to the running softmax of M rows."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf")).to(tl.float32) * LOG2E
    return add_part(top, total, sum_MV, sink, 1.0, tl.zeros_like(sum_MV))


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
    """Attend the rows of units to their keys; one program per unit and key head.

    A unit is (part, first row, stop row, offset of its page table, first key, stop key, position
    of key 0, causal, page of the first key); its first key is a multiple of BLOCK_N. The query
    heads of a key head are folded into rows, so a key is read once for all of them. A program
    writes its part of `parts` and `part_lses` or, with LAST, the merged result (Hydragen, eq. 5).

    Args:
        q: Pointer to the queries [T, H, D].
        k: Pointer to the keys of the pool [slots, key heads, D].
        v: Pointer to the values of the pool [slots, key heads, V].
        pages: Pointer to the page tables of all levels, concatenated.
        units: Pointer to the units [U, 9].
        positions: Pointer to the positions of query rows [T].
        parts: Pointer to the parts [P, T, H, V], float32.
        part_lses: Pointer to their LSEs [P, T, H], float32.
        dense: Pointer to the dense chunks [C, R, FOLD, H / FOLD, V], in the type of the queries.
        dense_lses: Pointer to their LSEs [C, H / FOLD, R, FOLD], float32.
        sinks: Pointer to the sinks [H].
        out: Pointer to the results [T, H, V].
        lses: Pointer to the LSEs [T, H].
        scale: Factor of the logits.
        window: Number of positions of the window or chunk.
        softcap: Bound of the logits.
        q_row: Stride of `q` between rows.
        q_head: Stride of `q` between heads.
        k_slot: Stride of `k` between cache slots.
        k_head: Stride of `k` between heads.
        v_slot: Stride of `v` between cache slots.
        v_head: Stride of `v` between heads.
        num_units: U, the number of units.
        num_rows: T, the number of query rows.
        dense_rows: R, the number of rows of the dense chunks.
        num_chunks: C, the number of dense chunks.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        D: Key dimension.
        V: Value dimension.
        BLOCK_D: Width of the block that holds a key or, with LATENT, the rotated numbers.
        BLOCK_V: Width of the block that holds a value or a latent.
        PAGE: Cache slots per page.
        BLOCK_M: Folded rows per program.
        BLOCK_N: Keys per block.
        FOLD: Query heads that the dense kernel folded into rows.
        HAS_POSITIONS: Whether causality or a window may hide keys.
        HAS_WINDOW: Which window there is, as in `reach_of`.
        HAS_CAP: Whether there is a softcap.
        HAS_SINKS: Whether there are sinks.
        LAST: Whether to merge with the dense chunks and the first parts, as many as the unit's
            first number says, and write `out` and `lses`.
        LATENT: Whether k and v are the same pool of D = V + P numbers: V numbers of a latent,
            followed by P rotated ones. A latent is read once, for logits and results. The rotated
            numbers have a block of their own, so that no block is wider than necessary.
    """
    # A load whose address was itself loaded waits twice, so chains of loads are kept short.
    unit, head = unit_of(units, num_units, H, PER_HEAD, LAST)
    start, stop = tl.load(unit + 1), tl.load(unit + 2)
    table = pages + tl.load(unit + 3)
    low, high, page = tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 8)
    if start >= stop:
        return

    block = start, stop, head
    if LATENT:
        row, q_at, mask, q_MD = rows_of(q, block, q_row, q_head, PER_HEAD, V, BLOCK_V, BLOCK_M)
        _, _, _, q_MP = rows_of(q + V, block, q_row, q_head, PER_HEAD, D - V, BLOCK_D, BLOCK_M)
    else:
        row, q_at, mask, q_MD = rows_of(q, block, q_row, q_head, PER_HEAD, D, BLOCK_D, BLOCK_M)
        if BLOCK_M == 1:
            q_D = tl.sum(q_MD.to(tl.float32), 0)
    newest, oldest, low, high = reach_of(
        unit, positions, row, mask, low, high, window, BLOCK_N, HAS_POSITIONS, HAS_WINDOW
    )
    if HAS_WINDOW:
        page = tl.load(table + low // PAGE, mask=low < high, other=0)

    part = tl.load(unit)
    if LAST:
        # Merge first, while the queries are being loaded: at the end no other load would overlap.
        written = parts, part_lses, part
        dense_part = dense, dense_lses, dense_rows, num_chunks
        top, total, sum_MV = merge_partials(
            row, q_at, mask, written, dense_part, num_rows, H, V, BLOCK_V, FOLD, 1
        )
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(low, high, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_bounds = n < high
        slot, page = slots_of(table, page, first, n, in_bounds, high, PAGE, BLOCK_N)
        # Keys and values may be stored in FP8.
        if LATENT:
            k_ND = load_block(k, slot, in_bounds, head, k_slot, k_head, V, BLOCK_V).to(q_MD.dtype)
            r_NP = load_block(k + V, slot, in_bounds, head, k_slot, k_head, D - V, BLOCK_D)
            logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
            rotated = tl.trans(r_NP.to(q_MD.dtype))
            logit = tl.dot(q_MP, rotated, logit, input_precision="ieee") * scale
        else:
            k_ND = load_block(k, slot, in_bounds, head, k_slot, k_head, D, BLOCK_D).to(q_MD.dtype)
            if BLOCK_M == 1:
                logit = tl.sum(k_ND.to(tl.float32) * q_D[None, :], 1)[None, :] * scale
            else:
                logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        if HAS_CAP:
            logit = cap_logits(logit, softcap)
        seen = seen_by(n, in_bounds, newest, oldest, HAS_POSITIONS, HAS_WINDOW)
        logit = tl.where(seen, logit * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - shift[:, None])
        alpha = tl.exp2(top - shift)
        if LATENT:
            v_NV = k_ND
        else:
            v_NV = load_block(v, slot, in_bounds, head, v_slot, v_head, V, BLOCK_V).to(q_MD.dtype)
        total = total * alpha + tl.sum(weight, 1)
        sum_MV = sum_MV * alpha[:, None]
        if BLOCK_M == 1:
            sum_MV += tl.sum(tl.sum(weight, 0)[:, None] * v_NV.to(tl.float32), 0)[None, :]
        else:
            sum_MV += tl.dot(weight.to(v_NV.dtype), v_NV, input_precision="ieee")
        top = new_top

    if LAST:
        if HAS_SINKS:
            top, total, sum_MV = _add_sinks(top, total, sum_MV, sinks, q_at, mask)
        store_rows(top, total, sum_MV, row, q_at, mask, out, lses, H, V, BLOCK_V)
    else:
        part_row = part * num_rows.to(tl.int64) + row
        store_rows(top, total, sum_MV, part_row, q_at, mask, parts, part_lses, H, V, BLOCK_V)


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
    """Merge all parts and dense chunks; one program per BLOCK_M pairs of a row and a head.

    Args:
        parts: Pointer to the parts [P, T, H, V], float32.
        part_lses: Pointer to their LSEs [P, T, H], float32.
        dense: Pointer to the dense chunks [C, R, FOLD, H / FOLD, V], in the type of the queries.
        dense_lses: Pointer to their LSEs [C, H / FOLD, R, FOLD], float32.
        sinks: Pointer to the sinks [H].
        out: Pointer to the results [T, H, V].
        lses: Pointer to the LSEs [T, H].
        num_rows: T, the number of query rows.
        dense_rows: R, the number of rows of the dense chunks.
        num_chunks: C, the number of dense chunks.
        num_parts: P, the number of parts.
        H: Query heads.
        V: Value dimension.
        BLOCK_V: Width of the block that holds a value.
        BLOCK_M: Pairs per program.
        FOLD: Query heads that the dense kernel folded into rows.
        HAS_SINKS: Whether there are sinks.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = pair // H, pair % H
    mask = row < num_rows
    written = parts, part_lses, num_parts
    dense_part = dense, dense_lses, dense_rows, num_chunks
    top, total, sum_MV = merge_partials(
        row, head, mask, written, dense_part, num_rows, H, V, BLOCK_V, FOLD, 4
    )
    if HAS_SINKS:
        top, total, sum_MV = _add_sinks(top, total, sum_MV, sinks, head, mask)
    store_rows(top, total, sum_MV, row, head, mask, out, lses, H, V, BLOCK_V)


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
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """Write new keys and values to cache slots; one program per token, for all heads.

    Args:
        k: Pointer to the new keys [T, G, K].
        v: Pointer to the new values [T, G, V].
        keys: Pointer to the keys of the pool [slots, G, K].
        values: Pointer to the values of the pool [slots, G, V].
        slots: Pointer to the cache slot of each token [T].
        k_row: Stride of `k` between tokens.
        k_head: Stride of `k` between heads.
        v_row: Stride of `v` between tokens.
        v_head: Stride of `v` between heads.
        k_slot: Stride of `keys` between cache slots.
        g_keys: Stride of `keys` between heads.
        v_slot: Stride of `values` between cache slots.
        g_values: Stride of `values` between heads.
        G: Key heads.
        K: Key dimension.
        V: Value dimension.
        BLOCK_G: G, rounded up to a power of two.
        BLOCK_K: K, rounded up to a power of two.
        BLOCK_V: V, rounded up to a power of two.
        MAX_VALUE: Bound to which numbers are clamped before rounding; 0 for none.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    g = tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_K)[None, :]
    e = tl.arange(0, BLOCK_V)[None, :]
    k_GK = tl.load(k + row * k_row + g * k_head + d, mask=(g < G) & (d < K))
    v_GV = tl.load(v + row * v_row + g * v_head + e, mask=(g < G) & (e < V))
    if MAX_VALUE > 0:
        k_GK = tl.minimum(tl.maximum(k_GK.to(tl.float32), -MAX_VALUE), MAX_VALUE).to(
            keys.dtype.element_ty
        )
        v_GV = tl.minimum(tl.maximum(v_GV.to(tl.float32), -MAX_VALUE), MAX_VALUE).to(
            values.dtype.element_ty
        )
    tl.store(keys + slot * k_slot + g * g_keys + d, k_GK, mask=(g < G) & (d < K))
    tl.store(values + slot * v_slot + g * g_values + e, v_GV, mask=(g < G) & (e < V))
