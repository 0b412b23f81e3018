"""Triton functions that the kernels over work lists share: a unit, its rows, its keys, its output.

Legend: M rows of a program, each a query row and a head, N keys of a block, T query rows, H query
heads, D key dimension, V value dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_of(units, num_units, H: tl.constexpr, PER_HEAD: tl.constexpr, LAST: tl.constexpr):
    """Where the nine numbers of this program's unit are, and its key head."""
    if LAST:
        # Programs of one row run together, for the heads of its keys lie side by side.
        heads: tl.constexpr = H // PER_HEAD
        unit, head = units + tl.program_id(0) // heads * 9, tl.program_id(0) % heads
    else:
        # Programs of one head run together, for rows share its keys.
        unit, head = units + tl.program_id(0) % num_units * 9, tl.program_id(0) // num_units
    return unit, head


@triton.jit
def rows_of(
    q,
    start,
    stop,
    head,
    q_row,
    q_head,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Query row and head of each of M rows, whether it is one of the unit, and its queries."""
    m = tl.arange(0, BLOCK_M)
    row = start + m // PER_HEAD
    q_at = head * PER_HEAD + m % PER_HEAD
    live = row < stop
    d = tl.arange(0, BLOCK_D)
    q_MD = tl.load(
        q + row[:, None].to(tl.int64) * q_row + q_at[:, None] * q_head + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return row, q_at, live, q_MD


@triton.jit
def reach_of(
    unit,
    positions,
    row,
    live,
    first,
    high,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The newest and the oldest key that each row sees, and from where to where some row sees any.

    All are indices into the unit's page table.
    """
    newest = tl.zeros([BLOCK_M], tl.int32) + high
    oldest = tl.zeros([BLOCK_M], tl.int32)
    if HAS_POSITIONS:
        origin, causal = tl.load(unit + 6), tl.load(unit + 7)
        position = tl.load(positions + row, mask=live, other=0).to(tl.int32) - origin
        newest = tl.where(causal != 0, position, newest)
        high = tl.minimum(high, tl.max(tl.where(live, newest, -1)) + 1)
        if HAS_WINDOW:
            oldest = position - window + 1
            nearest = tl.min(tl.where(live, oldest, high)) // BLOCK_N * BLOCK_N
            first = tl.maximum(first, nearest)
    return newest, oldest, first, high


@triton.jit
def slots_of(table, page, first, n, there, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of a block of keys, which begins at `first`, and the page of the next block."""
    if PAGE % BLOCK_N == 0:
        # One page holds the whole block; where the next block lies is asked for early.
        slot = page.to(tl.int64) * PAGE + first % PAGE + tl.arange(0, BLOCK_N)
        page = tl.load(table + tl.minimum(first + BLOCK_N, high - 1) // PAGE)
    else:
        slot = tl.load(table + n // PAGE, mask=there, other=0).to(tl.int64) * PAGE + n % PAGE
    return slot, page


@triton.jit
def load_block(pool, slot, there, head, by_slot, by_head, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys [N, D], or values, of one head; other numbers are 0."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        pool + slot[:, None] * by_slot + head * by_head + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def seen_by(n, there, newest, oldest, HAS_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Which of N keys each of M rows sees."""
    seen = there[None, :]
    if HAS_POSITIONS:
        seen = seen & (n[None, :] <= newest[:, None])
    if HAS_WINDOW:
        seen = seen & (n[None, :] >= oldest[:, None])
    return seen


@triton.jit
def store_rows(
    top,
    total,
    sum_MV,
    row,
    head,
    live,
    out,
    lses,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write out [T, H, V] and natural lses [T, H] of M rows; top is in base 2."""
    e = tl.arange(0, BLOCK_V)
    at = row.to(tl.int64) * H + head
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    tl.store(
        out + at[:, None] * V + e[None, :],
        (sum_MV / divisor[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (e < V)[None, :],
    )
    lse = tl.where(some, (top + tl.log2(divisor)) / LOG2E, float("-inf"))
    tl.store(lses + at, lse, mask=live)
