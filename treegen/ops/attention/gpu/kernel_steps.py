"""Triton functions shared by the kernels over work lists: a unit, its rows, keys and output.

Legend: M rows of a program, each a query row and a head, N keys of a block, T query rows, H query
heads, D key dimension, V value dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_of(units, num_units, H: tl.constexpr, PER_HEAD: tl.constexpr, LAST: tl.constexpr):
    """Return a pointer to the nine numbers of this program's unit, and its key head.

    Args:
        units: Pointer to the units [num_units, 9].
        num_units: Number of units.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        LAST: Whether consecutive programs are the key heads of one unit, not the units of one head.
    """
    if LAST:
        # Programs of one row run together, because the heads of its keys are adjacent in memory.
        heads: tl.constexpr = H // PER_HEAD
        unit, head = units + tl.program_id(0) // heads * 9, tl.program_id(0) % heads
    else:
        # Programs of one head run together, because rows share its keys.
        unit, head = units + tl.program_id(0) % num_units * 9, tl.program_id(0) // num_units
    return unit, head


@triton.jit
def rows_of(
    q,
    block,
    q_row,
    q_head,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return query row, query head, liveness and queries [M, D] of M folded rows.

    Args:
        q: Pointer to the queries [T, H, D].
        block: First query row of the unit, the end of its rows (exclusive), and the key head.
        q_row: Stride of `q` between rows, in elements.
        q_head: Stride of `q` between heads.
        PER_HEAD: Query heads per key head.
        D: Numbers of a query.
        BLOCK_D: Width of the block that holds them.
        BLOCK_M: Folded rows per program.
    """
    start, stop, head = block
    m = tl.arange(0, BLOCK_M)
    row = start + m // PER_HEAD
    q_at = head * PER_HEAD + m % PER_HEAD
    mask = row < stop
    d = tl.arange(0, BLOCK_D)
    q_MD = tl.load(
        q + row[:, None].to(tl.int64) * q_row + q_at[:, None] * q_head + d[None, :],
        mask=mask[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return row, q_at, mask, q_MD


@triton.jit
def reach_of(
    unit,
    positions,
    row,
    mask,
    first,
    high,
    window,
    BLOCK_N: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return the newest and oldest key that each row sees, and the range that any row sees.

    All keys are indices into the unit's page table.

    Args:
        unit: Pointer to the unit's numbers.
        positions: Pointer to the positions of query rows [T].
        row: Query row of each folded row [M].
        mask: Which folded rows belong to the unit [M].
        first: First key of the unit.
        high: End of the unit's keys, exclusive.
        window: Number of positions of the window or chunk.
        BLOCK_N: Keys per block. The range starts at a multiple of it.
        HAS_POSITIONS: Whether causality or a window may hide keys.
        HAS_WINDOW: 0 for no window, 1 for the last positions, 2 for those of the row's chunk.
    """
    oldest = tl.zeros([row.shape[0]], tl.int32)
    newest = oldest + high
    if HAS_POSITIONS:
        origin, causal = tl.load(unit + 6), tl.load(unit + 7)
        position = tl.load(positions + row, mask=mask, other=0).to(tl.int32) - origin
        newest = tl.where(causal != 0, position, newest)
        high = tl.minimum(high, tl.max(tl.where(mask, newest, -1)) + 1)
        if HAS_WINDOW:
            if HAS_WINDOW == 2:
                oldest = position - (position + origin) % window
            else:
                oldest = position - window + 1
            nearest = tl.min(tl.where(mask, oldest, high)) // BLOCK_N * BLOCK_N
            first = tl.maximum(first, nearest)
    return newest, oldest, first, high


@triton.jit
def slots_of(table, page, first, n, in_bounds, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the cache slots of a block of keys, and the page of the next block.

    Args:
        table: Pointer to the unit's page table.
        page: Page of the block's first key.
        first: First key of the block.
        n: Keys of the block [N].
        in_bounds: Which of the keys belong to the unit [N].
        high: End of the unit's keys, exclusive.
        PAGE: Cache slots per page.
        BLOCK_N: Keys per block.
    """
    if PAGE % BLOCK_N == 0:
        # One page holds the whole block. The page of the next block is loaded early.
        slot = page.to(tl.int64) * PAGE + first % PAGE + tl.arange(0, BLOCK_N)
        page = tl.load(table + tl.minimum(first + BLOCK_N, high - 1) // PAGE)
    else:
        slot = tl.load(table + n // PAGE, mask=in_bounds, other=0).to(tl.int64) * PAGE + n % PAGE
    return slot, page


@triton.jit
def load_block(
    pool, slot, in_bounds, head, by_slot, by_head, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load keys or values [N, D] of one head, with 0 for padding.

    Args:
        pool: Pointer to the keys or values [slots, heads, D].
        slot: Cache slots [N].
        in_bounds: Which of the slots to load [N].
        head: Key head.
        by_slot: Stride between slots, in elements.
        by_head: Stride between heads.
        D: Numbers per slot and head.
        BLOCK_D: Width of the block that holds them.
    """
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        pool + slot[:, None] * by_slot + head * by_head + d[None, :],
        mask=in_bounds[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def seen_by(n, in_bounds, newest, oldest, HAS_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return which of N keys each of M rows sees.

    Args:
        n: Keys of the block [N].
        in_bounds: Which of the keys belong to the unit [N].
        newest: Newest key that each row sees [M].
        oldest: Oldest key that each row sees [M].
        HAS_POSITIONS: Whether to compare with `newest`.
        HAS_WINDOW: Whether to compare with `oldest`.
    """
    seen = in_bounds[None, :]
    if HAS_POSITIONS:
        seen = seen & (n[None, :] <= newest[:, None])
    if HAS_WINDOW:
        seen = seen & (n[None, :] >= oldest[:, None])
    return seen


@triton.jit
def cap_logits(logit, softcap):
    """Return logits with a soft bound: softcap * tanh(logit / softcap)."""
    # tanh through exp, which does not overflow for large arguments of either sign.
    bend = tl.exp2(tl.abs(logit) * (-2 * LOG2E) / softcap)
    return tl.where(logit < 0, -1.0, 1.0) * softcap * ((1 - bend) / (1 + bend))


@triton.jit
def add_part(top, total, sum_MV, part_top, part_total, part_MV):
    """Add a partial result to the running softmax of M rows.

    Args:
        top: Maximum of each row's logits in base 2 [M].
        total: Sum of weights relative to `top` [M].
        sum_MV: Weighted sum of values [M, V].
        part_top: Maximum of the part, or its LSE in base 2 [M].
        part_total: Sum of the part's weights relative to `part_top` [M]; 1 for an LSE.
        part_MV: Weighted sum of the part's values [M, V].
    """
    new_top = tl.maximum(top, part_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    alpha, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
    total = total * alpha + part_total * weight
    return new_top, total, sum_MV * alpha[:, None] + part_MV * weight[:, None]


@triton.jit
def store_rows(
    top,
    total,
    sum_MV,
    row,
    head,
    mask,
    out,
    lses,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the results and natural LSEs of M rows.

    Args:
        top: Maximum of each row's logits in base 2 [M].
        total: Sum of weights relative to `top` [M].
        sum_MV: Weighted sum of values [M, V].
        row: Query row of each folded row [M].
        head: Query head of each folded row [M].
        mask: Which folded rows to write [M].
        out: Pointer to the results [T, H, V].
        lses: Pointer to the LSEs [T, H].
        H: Query heads.
        V: Value dimension.
        BLOCK_V: Width of the block that holds a value.
    """
    e = tl.arange(0, BLOCK_V)
    at = row.to(tl.int64) * H + head
    valid = total > 0
    divisor = tl.where(valid, total, 1.0)
    tl.store(
        out + at[:, None] * V + e[None, :],
        (sum_MV / divisor[:, None]).to(out.dtype.element_ty),
        mask=mask[:, None] & (e < V)[None, :],
    )
    lse = tl.where(valid, (top + tl.log2(divisor)) / LOG2E, float("-inf"))
    tl.store(lses + at, lse, mask=mask)
