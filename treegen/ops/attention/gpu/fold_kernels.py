"""Triton kernels of attention whose bits depend on a row's own keys alone (batch invariance).

A row's keys are folded in, 16 at a time, from the first to the last. Nothing else may change a
bit, so each choice that is made for speed must be exact:

-   The running maximum is rounded up to an integer. Weights are powers of two, so rescaling earlier
    sums is exact, however many keys a block has.
-   Logits are rounded to multiples of 2^-14. After different maxima are subtracted, logits differ
    by an integer only, so their powers of two have the same digits.
-   Keys that a row does not see have a weight of exactly zero.
-   Weights are summed by a matrix product with ones, in the same order as values.
-   A launch continues from the exact sums of the launch for the level above.

So rows per program, keys per block, and the starts of levels are free, if levels begin at multiples
of 16 positions. Sums restart only at multiples of PART positions, so that many programs can read
the keys of few rows.

Legend: T query rows, H query heads, D key dimension, V value dimension, M folded rows of a program
(a query row and a head each), U units, P parts. Strides are in elements.
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
from treegen.ops.attention.gpu.kernels import LISTS

# A float32 number between 512 and 1,024 is a multiple of 2^-14.
_GRID: tl.constexpr = tl.constexpr(768.0)
_ONES: tl.constexpr = tl.constexpr(16)  # columns of ones: the minimum of a matrix product
_COUNTS = ("num_units", "num_rows", "num_parts")


@triton.jit
def _add_sinks(top, total, sum_MV, sinks, head, mask):
    """Add the sinks [H] of each row's head to the sums of M rows."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf")).to(tl.float32) * LOG2E
    new_top = tl.maximum(top, tl.ceil(sink))
    alpha = tl.exp2(top - new_top)
    return new_top, total * alpha + tl.exp2(sink - new_top), sum_MV * alpha[:, None]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=LISTS[:3])
def fold_units(
    q,
    k,
    v,
    pages,
    units,
    positions,
    sums,
    stats,
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
    num_parts,
    H: tl.constexpr,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Fold the keys of units into the sums of their rows; one program per unit and key head.

    A unit is (part, first row, stop row, offset of its page table, first key, stop key, position
    of key 0, causal, unused). The query heads of a key head are folded into rows. A program reads
    the sums of its part, unless FIRST, and writes them back or, with LAST, writes the results.

    Args:
        q: Pointer to the queries [T, H, D].
        k: Pointer to the keys of the pool [slots, key heads, D].
        v: Pointer to the values of the pool [slots, key heads, V].
        pages: Pointer to the page tables of all levels, concatenated.
        units: Pointer to the units [U, 9].
        positions: Pointer to the positions of query rows [T].
        sums: Pointer to the weighted sums of values [P, T, H, V], float32.
        stats: Pointer to the integer maxima in base 2 and the total weights [2, P, T, H], float32;
            a total of 0 means no sum.
        sinks: Pointer to the sinks [H].
        out: Pointer to the results [T, H, V].
        lses: Pointer to the natural LSEs [T, H].
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
        num_parts: P, the number of parts.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        D: Key dimension.
        V: Value dimension.
        BLOCK_D: Width of the block that holds a key.
        BLOCK_V: Width of the block that holds a value.
        PAGE: Cache slots per page.
        BLOCK_M: Folded rows per program.
        BLOCK_N: Keys per block.
        HAS_POSITIONS: Whether causality or a window may hide keys.
        HAS_WINDOW: Which window there is, as in `reach_of`.
        HAS_CAP: Whether there is a softcap.
        HAS_SINKS: Whether there are sinks.
        FIRST: Whether this is the first launch, so that no sums exist.
        LAST: Whether this is the last launch and there is one part, so that `out` and `lses` are
            written instead of sums.
    """
    unit, head = unit_of(units, num_units, H, PER_HEAD, LAST)
    start, stop = tl.load(unit + 1), tl.load(unit + 2)
    table = pages + tl.load(unit + 3)
    low, high = tl.load(unit + 4), tl.load(unit + 5)
    if start >= stop:
        return

    block = start, stop, head
    row, q_at, mask, q_MD = rows_of(q, block, q_row, q_head, PER_HEAD, D, BLOCK_D, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    first = low // BLOCK_N * BLOCK_N
    newest, oldest, first, high = reach_of(
        unit, positions, row, mask, first, high, window, BLOCK_N, HAS_POSITIONS, HAS_WINDOW
    )
    page = tl.load(table + first // PAGE, mask=first < high, other=0)

    at = (tl.load(unit) * num_rows.to(tl.int64) + row) * H + q_at
    size = num_parts.to(tl.int64) * num_rows * H
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, _ONES], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if not FIRST:
        before = tl.load(stats + size + at, mask=mask, other=0.0)
        valid = before > 0
        top = tl.where(valid, tl.load(stats + at, mask=mask & valid, other=0.0), top)
        total += before[:, None]
        sum_MV = tl.load(
            sums + at[:, None] * V + e[None, :], mask=valid[:, None] & (e < V)[None, :], other=0.0
        )
    ones = tl.full([BLOCK_N, _ONES], 1.0, q_MD.dtype)
    for begin in range(first, high, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        in_bounds = (n >= low) & (n < high)
        slot, page = slots_of(table, page, begin, n, in_bounds, high, PAGE, BLOCK_N)
        # Keys and values may be stored in FP8.
        k_ND = load_block(k, slot, in_bounds, head, k_slot, k_head, D, BLOCK_D).to(q_MD.dtype)
        logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if HAS_CAP:
            logit = tl.fma(cap_logits(logit * scale, softcap), LOG2E, _GRID) - _GRID
        else:
            logit = tl.fma(logit, scale * LOG2E, _GRID) - _GRID
        seen = seen_by(n, in_bounds, newest, oldest, HAS_POSITIONS, HAS_WINDOW)
        logit = tl.where(seen, logit, float("-inf"))
        new_top = tl.maximum(top, tl.ceil(tl.max(logit, 1)))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - shift[:, None]).to(q_MD.dtype)
        alpha = tl.exp2(top - shift)
        v_NV = load_block(v, slot, in_bounds, head, v_slot, v_head, V, BLOCK_V).to(q_MD.dtype)
        total = tl.dot(weight, ones, total * alpha[:, None], input_precision="ieee")
        sum_MV = tl.dot(weight, v_NV, sum_MV * alpha[:, None], input_precision="ieee")
        top = new_top

    total_M = tl.max(total, 1)
    if LAST:
        if HAS_SINKS:
            top, total_M, sum_MV = _add_sinks(top, total_M, sum_MV, sinks, q_at, mask)
        store_rows(top, total_M, sum_MV, row, q_at, mask, out, lses, H, V, BLOCK_V)
    else:
        tl.store(sums + at[:, None] * V + e[None, :], sum_MV, mask=mask[:, None] & (e < V)[None, :])
        tl.store(stats + at, top, mask=mask)
        tl.store(stats + size + at, total_M, mask=mask)


@triton.jit(do_not_specialize=_COUNTS[1:])
def merge_sums(
    sums,
    stats,
    sinks,
    out,
    lses,
    num_rows,
    num_parts,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add parts from first to last; one program per BLOCK_M pairs of a row and a head.

    Args:
        sums: Pointer to the weighted sums of values [P, T, H, V], float32.
        stats: Pointer to the integer maxima in base 2 and the total weights [2, P, T, H], float32;
            a total of 0 means no sum.
        sinks: Pointer to the sinks [H].
        out: Pointer to the results [T, H, V].
        lses: Pointer to the natural LSEs [T, H].
        num_rows: T, the number of query rows.
        num_parts: P, the number of parts.
        H: Query heads.
        V: Value dimension.
        BLOCK_V: Width of the block that holds a value.
        BLOCK_M: Pairs per program.
        HAS_SINKS: Whether there are sinks.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = pair // H, pair % H
    mask = row < num_rows
    e = tl.arange(0, BLOCK_V)
    rows_size = num_rows.to(tl.int64) * H
    size = num_parts.to(tl.int64) * rows_size
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for p in range(num_parts):
        at = p * rows_size + pair
        part_total = tl.load(stats + size + at, mask=mask, other=0.0)
        valid = part_total > 0
        part_top = tl.load(stats + at, mask=mask & valid, other=float("-inf"))
        part_MV = tl.load(
            sums + at[:, None] * V + e[None, :], mask=valid[:, None] & (e < V)[None, :], other=0.0
        )
        top, total, sum_MV = add_part(top, total, sum_MV, part_top, part_total, part_MV)
    if HAS_SINKS:
        top, total, sum_MV = _add_sinks(top, total, sum_MV, sinks, head, mask)
    store_rows(top, total, sum_MV, row, head, mask, out, lses, H, V, BLOCK_V)
