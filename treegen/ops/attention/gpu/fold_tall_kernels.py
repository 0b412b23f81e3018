"""A Gluon kernel for Hopper that folds keys into tall units, with the same bits as `fold_units`.

Two groups of warps compute 64 folded rows each, while one more warp copies the next keys and values
to shared memory. Each group starts the logits of the next block before the product with the values
of the current block, so that tensor cores seldom wait.

Legend: T query rows, H query heads, D width of keys and values, M folded rows of a group of warps,
U units, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treegen.ops.attention.gpu.launch import LayerCall
from treegen.ops.attention.gpu.work_units import KEY_BLOCK, UNIT

LOG2E = gl.constexpr(1.4426950408889634)
GRID = gl.constexpr(768.0)  # as in `fold_units`
PAGE = gl.constexpr(KEY_BLOCK)  # keys of a page
FIELDS = gl.constexpr(UNIT)
ROWS = gl.constexpr(64)  # folded rows of a group of warps
ONES = gl.constexpr(8)  # columns of ones: the minimum of a matrix product
STAGES = gl.constexpr(2)  # blocks of keys and of values in shared memory
WARPS = gl.constexpr(4)
# Triton 3.9 renamed it.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def copy_keys(k, v, pages, work, shared, D: gl.constexpr):
    """Copy a unit's keys and values to shared memory, in blocks of two pages.

    Args:
        k: Descriptor of the keys; see `fold_tall`.
        v: Descriptor of the values.
        pages: Pointer to the page tables of all levels, concatenated.
        work: Units, and their number.
        shared: Shared memory and barriers; see `fold_tall`.
        D: Width of keys and values.
    """
    keys, values, k_full, k_empty, v_full, v_empty = shared
    units, num_units = work
    unit = units + gl.program_id(0) % num_units * FIELDS
    head = gl.program_id(0) // num_units
    start, stop = gl.load(unit + 1), gl.load(unit + 2)
    if start < stop:
        table, low, high = pages + gl.load(unit + 3), gl.load(unit + 4), gl.load(unit + 5)
        first = low // PAGE * PAGE
        for begin in range(first, high, 2 * PAGE):
            block = (begin - first) // (2 * PAGE)
            s = block % STAGES
            phase = (block // STAGES + 1) & 1
            # A page past the end may hold anything; its keys are hidden.
            page_0 = gl.load(table + begin // PAGE)
            page_1 = gl.load(table + begin // PAGE + 1, mask=begin + PAGE < high, other=0)
            mbarrier.wait(k_empty.index(s), phase)
            mbarrier.expect(k_full.index(s), 2 * PAGE * D * 2)
            async_load(k, [page_0 * PAGE, head * D], k_full.index(s), keys.index(2 * s))
            async_load(k, [page_1 * PAGE, head * D], k_full.index(s), keys.index(2 * s + 1))
            mbarrier.wait(v_empty.index(s), phase)
            mbarrier.expect(v_full.index(s), 2 * PAGE * D * 2)
            async_load(v, [page_0 * PAGE, head * D], v_full.index(s), values.index(2 * s))
            async_load(v, [page_1 * PAGE, head * D], v_full.index(s), values.index(2 * s + 1))


@gluon.jit
def start_logits(q_MD, keys, s, LOGITS: gl.constexpr):
    """Start the products of queries with a block of keys, for both pages.

    Args:
        q_MD: Queries [M, D].
        keys: Shared memory of the keys.
        s: Which block of the shared memory to read.
        LOGITS: Layout of the products.
    """
    zero = gl.zeros([ROWS, PAGE], gl.float32, LOGITS)
    first = warpgroup_mma(
        q_MD, keys.index(2 * s).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    second = warpgroup_mma(
        q_MD, keys.index(2 * s + 1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    return first, second


@gluon.jit
def start_sums(weights, ones, values, s, total, acc):
    """Start adding up the weights of a block and its weighted values.

    Args:
        weights: The weights of both pages [M, PAGE].
        ones: Shared memory that holds ones [ONES, PAGE].
        values: Shared memory of the values.
        s: Which block of the shared memory to read.
        total: Sums of weights [M, ONES].
        acc: Weighted sums of values [M, D].
    """
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    T: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    first, second = weights
    acc = warpgroup_mma(gl.convert_layout(first, P), values.index(2 * s), acc, is_async=True)
    acc = warpgroup_mma(gl.convert_layout(second, P), values.index(2 * s + 1), acc, is_async=True)
    column = ones.permute((1, 0))
    total = warpgroup_mma(gl.convert_layout(first, T), column, total, is_async=True)
    total = warpgroup_mma(gl.convert_layout(second, T), column, total, is_async=True)
    return total, acc


@gluon.jit
def weigh(logits, top, begin, low, high, scale, dtype: gl.constexpr):
    """Return the new maximum, the factor of earlier sums, and the weights of a block's pages.

    Args:
        logits: The products of queries and keys of both pages [M, PAGE].
        top: Maximum of earlier logits, rounded up [M].
        begin: First key of the block.
        low: First key of the unit.
        high: End of the unit's keys, exclusive.
        scale: Factor of the logits.
        dtype: Type of the weights.
    """
    first, second = logits
    first = gl.fma(first, scale * LOG2E, GRID) - GRID
    second = gl.fma(second, scale * LOG2E, GRID) - GRID
    if (begin < low) | (begin + 2 * PAGE > high):
        n = begin + gl.arange(0, PAGE, layout=gl.SliceLayout(0, first.type.layout))
        first = gl.where(((n >= low) & (n < high))[None, :], first, -float("inf"))
        second = gl.where((n + PAGE < high)[None, :], second, -float("inf"))
    new_top = gl.maximum(top, gl.ceil(gl.max(gl.maximum(first, second), 1)))
    shift = gl.where(new_top == -float("inf"), 0.0, new_top)
    weights = (
        gl.exp2(first - shift[:, None]).to(dtype),
        gl.exp2(second - shift[:, None]).to(dtype),
    )
    return new_top, gl.exp2(top - shift), weights


@gluon.jit
def clear_keys(page, begin, low, high):
    """Replace the rows of a page that are not keys of the unit by 0; they may be NaN.

    Args:
        page: Shared memory of the page [PAGE, D].
        begin: Index of its first row among the keys of the page table.
        low: First key of the unit.
        high: End of the unit's keys, exclusive.
    """
    D: gl.constexpr = page.shape[1]
    R: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    n = begin + gl.arange(0, PAGE, layout=gl.SliceLayout(1, R))
    page.store(gl.where(((n >= low) & (n < high))[:, None], page.load(R), 0.0))


@gluon.jit
def fold_keys(q_MD, top, total, acc, low, high, scale, shared, ones, LOGITS: gl.constexpr):
    """Fold the keys of a unit into the sums of one group's rows.

    Args:
        q_MD: Queries [M, D].
        top: Maximum of earlier logits, rounded up [M].
        total: Sums of earlier weights [M, ONES].
        acc: Earlier weighted sums of values [M, D].
        low: First key of the unit.
        high: End of the unit's keys, exclusive.
        scale: Factor of the logits.
        shared: Shared memory and barriers; see `fold_tall`.
        ones: Shared memory that holds ones [ONES, PAGE].
        LOGITS: Layout of logits.

    Returns:
        The new maximum, sums of weights, and weighted sums.
    """
    keys, values, k_full, k_empty, v_full, v_empty = shared
    SUMS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    TOTALS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    first = low // PAGE * PAGE
    if first < high:
        mbarrier.wait(k_full.index(0), 0)
        logits = start_logits(q_MD, keys, 0, LOGITS)
        logits = warpgroup_mma_wait(0, deps=logits)
        mbarrier.arrive(k_empty.index(0))
        top, alpha, weights = weigh(logits, top, first, low, high, scale, q_MD.dtype)
        total = total * gl.convert_layout(alpha, TOTALS)[:, None]
        acc = acc * gl.convert_layout(alpha, SUMS)[:, None]
        block = 0
        for begin in range(first + 2 * PAGE, high, 2 * PAGE):
            s = block % STAGES
            following = (block + 1) % STAGES
            mbarrier.wait(k_full.index(following), ((block + 1) // STAGES) & 1)
            logits = start_logits(q_MD, keys, following, LOGITS)
            mbarrier.wait(v_full.index(s), (block // STAGES) & 1)
            total, acc = start_sums(weights, ones, values, s, total, acc)
            logits = warpgroup_mma_wait(4, deps=logits)
            mbarrier.arrive(k_empty.index(following))
            top, alpha, weights = weigh(logits, top, begin, low, high, scale, q_MD.dtype)
            total, acc = warpgroup_mma_wait(0, deps=[total, acc])
            mbarrier.arrive(v_empty.index(s))
            total = total * gl.convert_layout(alpha, TOTALS)[:, None]
            acc = acc * gl.convert_layout(alpha, SUMS)[:, None]
            block += 1
        s = block % STAGES
        mbarrier.wait(v_full.index(s), (block // STAGES) & 1)
        begin = first + block * 2 * PAGE
        # Keys before `low` are keys of an earlier part, so they are numbers.
        if begin + 2 * PAGE > high:
            clear_keys(values.index(2 * s), begin, low, high)
            clear_keys(values.index(2 * s + 1), begin + PAGE, low, high)
            fence_async_shared()
        total, acc = start_sums(weights, ones, values, s, total, acc)
        total, acc = warpgroup_mma_wait(0, deps=[total, acc])
    return top, total, acc


@gluon.jit
def fold_rows(
    data,
    work,
    shared,
    ones,
    options,
    H: gl.constexpr,
    PER_HEAD: gl.constexpr,
    D: gl.constexpr,
    FIRST: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Fold a unit's keys into the sums of the rows of one group of warps.

    Args:
        data: Pointers to the queries, sums and stats; see `fold_tall`.
        work: Units, and their number.
        shared: Shared memory and barriers; see `fold_tall`.
        ones: Shared memory that holds ones [ONES, PAGE].
        options: Factor of the logits, strides of `q` between rows and heads, T and P.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        D: Width of keys and values.
        FIRST: Whether no sums exist.
        SIDE: Which group this is.
    """
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PAGE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    TOTALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ONES, 16])
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    q, sums, stats = data
    units, num_units = work
    scale, q_row, q_head, num_rows, num_parts = options
    unit = units + gl.program_id(0) % num_units * FIELDS
    head = gl.program_id(0) // num_units
    start, stop = gl.load(unit + 1), gl.load(unit + 2)
    if start < stop:
        part, low, high = gl.load(unit), gl.load(unit + 4), gl.load(unit + 5)
        m = SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ROWWISE))
        row = start + m // PER_HEAD
        q_at = row.to(gl.int64) * q_row + (head * PER_HEAD + m % PER_HEAD) * q_head
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ROWWISE))
        q_MD = gl.load(q + q_at[:, None] + d[None, :], mask=(row < stop)[:, None], other=0.0)
        q_MD = gl.convert_layout(q_MD, gl.DotOperandLayout(0, LOGITS, 2))

        m = SIDE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        row = start + m // PER_HEAD
        mask = row < stop
        at = (part * num_rows.to(gl.int64) + row) * H + head * PER_HEAD + m % PER_HEAD
        size = num_parts.to(gl.int64) * num_rows * H
        d = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
        top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.zeros([ROWS, ONES], gl.float32, TOTALS)
        acc = gl.zeros([ROWS, D], gl.float32, SUMS)
        if not FIRST:
            before = gl.load(stats + size + at, mask=mask, other=0.0)
            valid = before > 0
            top = gl.convert_layout(
                gl.load(stats + at, mask=valid, other=-float("inf")), gl.SliceLayout(1, LOGITS)
            )
            total += gl.convert_layout(before, gl.SliceLayout(1, TOTALS))[:, None]
            acc = gl.load(sums + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)

        top, total, acc = fold_keys(q_MD, top, total, acc, low, high, scale, shared, ones, LOGITS)
        gl.store(sums + at[:, None] * D + d[None, :], acc, mask=mask[:, None])
        gl.store(stats + at, gl.convert_layout(top, gl.SliceLayout(1, SUMS)), mask=mask)
        total_M = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, SUMS))
        gl.store(stats + size + at, total_M, mask=mask)


@gluon.jit(
    do_not_specialize=("num_units", "num_rows", "num_parts"),
    do_not_specialize_on_alignment=("pages", "units"),
)
def fold_tall(
    k,
    v,
    q,
    pages,
    units,
    sums,
    stats,
    num_units,
    num_rows,
    num_parts,
    scale,
    q_row,
    q_head,
    H: gl.constexpr,
    PER_HEAD: gl.constexpr,
    D: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Fold the keys of tall units into the sums of their rows; one program per unit and key head.

    Args:
        k: Descriptor of the keys of the pool [slots, key heads x D], for pages of one head.
        v: The same for the values.
        q: Pointer to the queries [T, H, D].
        pages: Pointer to the page tables of all levels, concatenated.
        units: Pointer to the units; see `fold_units`. No row is hidden from a key.
        sums: Pointer to the weighted sums of values [P, T, H, D]; see `fold_units`.
        stats: Pointer to the maxima and the total weights [2, P, T, H].
        num_units: U, the number of units.
        num_rows: T, the number of query rows.
        num_parts: P, the number of parts.
        scale: Factor of the logits.
        q_row: Stride of `q` between rows.
        q_head: Stride of `q` between heads.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        D: Width of keys and values.
        FIRST: Whether this is the first launch, so that no sums exist.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    R: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(k.dtype, [2 * STAGES, PAGE, D], TILE)
    values = gl.allocate_shared_memory(k.dtype, [2 * STAGES, PAGE, D], TILE)
    full = gl.full([ONES, PAGE], 1.0, k.dtype, R)
    ones = gl.allocate_shared_memory(k.dtype, [ONES, PAGE], TILE, full)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()
    # Keys and values each have barriers that say that a block has arrived, and that it may be
    # overwritten.
    shared = (keys, values, k_full, k_empty, v_full, v_empty)
    work = (units, num_units)
    options = (scale, q_row, q_head, num_rows, num_parts)
    data = (q, sums, stats)
    gl.warp_specialize(
        [
            (fold_rows, (data, work, shared, ones, options, H, PER_HEAD, D, FIRST, 0)),
            (fold_rows, (data, work, shared, ones, options, H, PER_HEAD, D, FIRST, 1)),
            (copy_keys, (k, v, pages, work, shared, D)),
        ],
        [WARPS, 1],
        [240, 24],
    )


def can_fold_tall(call: LayerCall) -> bool:
    """Return whether the kernel supports a layer's tensors and options, on a GPU that has it.

    In float16, small weights have so few digits that blocks of other sizes give other bits.
    """
    q_THD, keys, values, options = call.q_THD, call.keys, call.values, call.options
    width = q_THD.shape[2]
    return (
        width in (64, 128)
        and values.shape[3] == width
        and keys.shape[1] == PAGE.value
        and q_THD.dtype == torch.bfloat16
        and options.window is None
        and options.softcap is None
        and all(
            pool.dtype == q_THD.dtype
            # Slots are rows of one matrix, as TMA needs.
            and pool.stride()[2:] == (width, 1)
            and pool.stride(0) == pool.shape[1] * pool.stride(1)
            and pool.stride(1) % 8 == 0
            and pool.data_ptr() % 16 == 0
            for pool in (keys, values)
        )
    )


def launch_fold_tall(
    call: LayerCall, units: Tensor, sums: Tensor, stats: Tensor, *, first: bool
) -> None:
    """Fold the keys of tall units into the sums of their rows.

    Args:
        call: The inputs of the layer.
        units: The units [U, 9], each with at most 128 folded rows.
        sums: The weighted sums of values [P, T, H, D], to be updated.
        stats: The maxima and the total weights [2, P, T, H], to be updated.
        first: Whether no sums exist.
    """
    q_THD, kv_heads = call.q_THD, call.keys.shape[2]
    num_rows, q_heads, width = q_THD.shape

    def _describe(pool: Tensor) -> TensorDescriptor:
        shape = [pool.shape[0] * pool.shape[1], kv_heads * width]
        return TensorDescriptor(pool, shape, [pool.stride(1), 1], [PAGE.value, width], _SHARED)

    fold_tall[(len(units) * kv_heads,)](
        _describe(call.keys),
        _describe(call.values),
        q_THD,
        call.work.pages,
        units,
        sums,
        stats,
        len(units),
        num_rows,
        len(sums),
        call.options.scale,
        q_THD.stride(0),
        q_THD.stride(1),
        H=q_heads,
        PER_HEAD=call.per_head,
        D=width,
        FIRST=first,
        num_warps=WARPS.value,
    )


_SHARED = gl.NVMMASharedLayout(128, 16, 2)
