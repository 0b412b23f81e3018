"""Triton kernels: attention of blocks of query rows to runs of paged keys, and the merge.

Legend: T query rows, H query heads, D key dimension, V value dimension, P parts to merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_units(
    q, k, v, pages, units, positions, out, lse,
    scale, window, softcap,
    q_row, q_head, k_slot, k_head, v_slot, v_head, num_rows,
    H: tl.constexpr, PER_HEAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One program: one unit of the work list and one key head.

    A unit is (part, first row, stop row, offset of its page table, first key, stop key, position
    of key 0, causal). The query heads of a key head are folded into rows, so a key is read once
    for all of them. Writes out [P, T, H, V] and lse [P, T, H] in float32.
    """
    unit = units + tl.program_id(0) * 8
    head = tl.program_id(1)
    part = tl.load(unit).to(tl.int64)
    start, stop = tl.load(unit + 1), tl.load(unit + 2)
    table = pages + tl.load(unit + 3)
    low, high = tl.load(unit + 4), tl.load(unit + 5)
    origin, causal = tl.load(unit + 6), tl.load(unit + 7)

    m = tl.arange(0, BLOCK_M)
    row = start + m // PER_HEAD
    q_at = head * PER_HEAD + m % PER_HEAD
    live = row < stop
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    q_MD = tl.load(
        q + row[:, None].to(tl.int64) * q_row + q_at[:, None] * q_head + d[None, :],
        mask=live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    # Keys that a row sees lie from oldest to newest, as indices into the unit's page table.
    newest = tl.zeros([BLOCK_M], tl.int32) + high
    oldest = tl.zeros([BLOCK_M], tl.int32)
    if HAS_POSITIONS:
        position = tl.load(positions + row, mask=live, other=0).to(tl.int32) - origin
        newest = tl.where(causal != 0, position, newest)
        high = tl.minimum(high, tl.max(tl.where(live, newest, -1)) + 1)
        if HAS_WINDOW:
            oldest = position - window + 1
            low = tl.maximum(low, tl.min(tl.where(live, oldest, high)))

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(low, high, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = n < high
        page = tl.load(table + n // PAGE, mask=there, other=0).to(tl.int64)
        slot = page * PAGE + n % PAGE
        k_DN = tl.load(
            k + slot[None, :] * k_slot + head * k_head + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        )
        logit = tl.dot(q_MD, k_DN, input_precision="ieee") * scale
        if HAS_CAP:
            # tanh through exp, which does not overflow for large arguments of either sign.
            bend = tl.exp2(tl.abs(logit) * (-2 * LOG2E) / softcap)
            sign = tl.where(logit < 0, -1.0, 1.0)
            logit = sign * softcap * ((1 - bend) / (1 + bend))
        seen = there[None, :]
        if HAS_POSITIONS:
            seen = seen & (n[None, :] <= newest[:, None])
        if HAS_WINDOW:
            seen = seen & (n[None, :] >= oldest[:, None])
        logit = tl.where(seen, logit * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        floor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - floor[:, None])
        keep = tl.exp2(top - floor)
        v_NV = tl.load(
            v + slot[:, None] * v_slot + head * v_head + e[None, :],
            mask=there[:, None] & (e < V)[None, :],
            other=0.0,
        )
        total = total * keep + tl.sum(weight, 1)
        sum_MV = sum_MV * keep[:, None]
        sum_MV += tl.dot(weight.to(v_NV.dtype), v_NV, input_precision="ieee")
        top = new_top

    some = total > 0
    divisor = tl.where(some, total, 1.0)
    at = (part * num_rows + row.to(tl.int64)) * H + q_at
    tl.store(
        out + at[:, None] * V + e[None, :],
        sum_MV / divisor[:, None],
        mask=live[:, None] & (e < V)[None, :],
    )
    tl.store(lse + at, tl.where(some, (top + tl.log2(divisor)) / LOG2E, float("-inf")), mask=live)


@triton.jit
def merge_parts(
    parts, lses, sinks, out, lse, num_parts, num_heads,
    V: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one row and head of out [T, H, V] and lse [T, H] from [P, T, H, ...] parts.

    Weights are the softmax of the parts' LSEs (Hydragen, eq. 5); an empty part is not read.
    """
    at = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64)
    e = tl.arange(0, BLOCK_V)
    top = tl.full([], float("-inf"), tl.float32)
    for p in range(num_parts):
        top = tl.maximum(top, tl.load(lses + p * stride + at))
    if HAS_SINKS:
        sink = tl.load(sinks + at % num_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([], tl.float32)
    if HAS_SINKS:
        total += tl.exp(sink - floor)
    sum_V = tl.zeros([BLOCK_V], tl.float32)
    for p in range(num_parts):
        one = tl.load(lses + p * stride + at)
        weight = tl.exp(one - floor)
        total += weight
        there = e < tl.where(one == float("-inf"), 0, V)
        sum_V += weight * tl.load(parts + (p * stride + at) * V + e, mask=there, other=0.0)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + at * V + e, (sum_V / divisor).to(out.dtype.element_ty), mask=e < V)
    tl.store(lse + at, tl.where(total > 0, floor + tl.log(divisor), float("-inf")))
