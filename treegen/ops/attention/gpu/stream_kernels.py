"""A Gluon kernel for Hopper that reads latents as a stream, and its launch.

One warp copies queries and latents to shared memory ahead of the warps that compute. Latents are
the rows of both products: logits are latents times queries, and results are transposed latents
times weights. So each group of warps reads a latent from shared memory twice, however few query
rows a unit has. The next block of latents is copied while a block is computed.

Legend: T query rows, H query heads, N folded rows of a unit (a query row and a head each), R rank,
P rotated numbers.
"""

from __future__ import annotations

import torch
import triton
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
BLOCK = gl.constexpr(KEY_BLOCK)  # latents per block, a page
FIELDS = gl.constexpr(UNIT)
RANK = gl.constexpr(512)
ROTATED = gl.constexpr(64)
STAGES = gl.constexpr(2)  # blocks of latents in shared memory
WARPS = gl.constexpr(4)
# Triton 3.9 renamed it.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def copy_units(
    sources,
    pages,
    work,
    shared,
    H: gl.constexpr,
    PER_HEAD: gl.constexpr,
    N: gl.constexpr,
    SIDES: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Copy the queries and latents of this program's units to shared memory, in order.

    Args:
        sources: The descriptors of `stream_units`.
        pages: Pointer to the page tables of all levels, concatenated.
        work: Units, their number and that of query rows; see `stream_units`.
        shared: Shared memory and barriers; see `stream_units`.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        N: Folded rows of a side.
        SIDES: Groups of warps that share the folded rows of a unit.
        QUERIES: Units whose queries are in shared memory.
    """
    latents, rotated, q, q_rotated = sources
    units, num_units, _ = work
    blocks, block_rests, queries, query_rests, full, empty, q_full, q_empty = shared
    tile = 0
    number = 0
    for index in range(gl.program_id(0), num_units, gl.num_programs(0)):
        unit, head = units + index // (H // PER_HEAD) * FIELDS, index % (H // PER_HEAD) * PER_HEAD
        start, stop = gl.load(unit + 1), gl.load(unit + 2)
        if start < stop:
            table, low, high = gl.load(unit + 3), gl.load(unit + 4), gl.load(unit + 5)
            page = gl.load(unit + 8)
            s = number % QUERIES
            mbarrier.wait(q_empty.index(s), (number // QUERIES + 1) & 1)
            mbarrier.expect(q_full.index(s), SIDES * N * (RANK + ROTATED) * 2)
            for side in gl.static_range(SIDES):
                row, at = start * H + head + side * N, s * SIDES + side
                async_load(q, [row, 0], q_full.index(s), queries.index(at))
                async_load(q_rotated, [row, RANK], q_full.index(s), query_rests.index(at))
            number += 1
            # A unit without keys has one block, which counts for nothing.
            for first in range(low, gl.maximum(high, low + 1), BLOCK):
                s = tile % STAGES
                mbarrier.wait(empty.index(s), (tile // STAGES + 1) & 1)
                mbarrier.expect(full.index(s), BLOCK * (RANK + ROTATED) * 2)
                async_load(latents, [page * BLOCK, 0], full.index(s), blocks.index(s))
                async_load(rotated, [page * BLOCK, RANK], full.index(s), block_rests.index(s))
                following = first + BLOCK
                page = gl.load(pages + table + following // BLOCK, mask=following < high, other=0)
                tile += 1


@gluon.jit
def store_weights(logits, top, total, weights):
    """Store the weights of a block.

    Args:
        logits: Logits in base 2 [BLOCK, N].
        top: Maximum of earlier logits [N].
        total: Sums of weights relative to `top`, not yet summed over a block's rows [BLOCK, N].
        weights: Shared memory for the weights [BLOCK, N].

    Returns:
        The new maximum and sums, and the factor of earlier results [N].
    """
    new_top = gl.maximum(top, gl.max(logits, 0))
    shift = gl.where(new_top == -float("inf"), 0.0, new_top)
    alpha = gl.exp2(top - shift)
    weight = gl.exp2(logits - shift[None, :])
    weights.store(weight.to(weights.dtype))
    fence_async_shared()
    return new_top, total * alpha[None, :] + weight, alpha


@gluon.jit
def clear_slots(block, rest):
    """Replace the rows of a block from `rest` on by 0; they may hold anything, also NaN."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, ROWS))
    for c in gl.static_range(RANK // 64):
        chunk = block.slice(c * 64, 64, 1)
        chunk.store(gl.where((slot < rest)[:, None], chunk.load(ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def write_results(top, total, acc, query, out, lses, at, count):
    """Write the results and LSEs of a unit.

    Args:
        top: Maximum of the logits in base 2 [N].
        total: Sums of weights relative to `top` [BLOCK, N].
        acc: Weighted sums of latents [R, N].
        query: Shared memory of the unit's queries. Results are transposed there afterwards.
        out: Pointer to results [rows, R].
        lses: Pointer to LSEs [rows].
        at: The unit's first row.
        count: The unit's number of rows.
    """
    N: gl.constexpr = query.shape[0]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    sums = gl.sum(total, 0)
    divisor = gl.where(sums > 0, sums, 1.0)
    lse = gl.where(sums > 0, (top + gl.log2(divisor)) / LOG2E, -float("inf"))
    column = gl.arange(0, N, layout=sums.type.layout)
    gl.store(lses + at + column, lse, mask=column < count)
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(0, acc.type.layout))[None, :]
    query.permute((1, 0)).store(acc.to(query.dtype))
    row = gl.arange(0, N, layout=gl.SliceLayout(1, ROWS))
    number = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    target = out + (at + row).to(gl.int64)[:, None] * RANK + number[None, :]
    for c in gl.static_range(RANK // 64):
        chunk = query.slice(c * 64, 64, 1).load(ROWS)
        gl.store(target + c * 64, chunk, mask=(row < count)[:, None])
    fence_async_shared()


@gluon.jit
def compute_units(
    to,
    work,
    shared,
    H: gl.constexpr,
    PER_HEAD: gl.constexpr,
    N: gl.constexpr,
    SIDES: gl.constexpr,
    QUERIES: gl.constexpr,
    LAST: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Attend columns of this program's units, in the order in which their latents arrive.

    Args:
        to: Results, LSEs, shared memory for the weights [SIDES, BLOCK, N], and the factor of the
            logits; see `stream_units`.
        work: Units, their number and that of query rows; see `stream_units`.
        shared: Shared memory and barriers; see `stream_units`.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        N: Folded rows of a side.
        SIDES: Groups of warps that share the folded rows of a unit.
        QUERIES: Units whose queries are in shared memory.
        LAST: Whether to write results instead of parts.
        SIDE: Which of these groups this is.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S))
    out, lses, weights, scale = to
    units, num_units, num_rows = work
    blocks, block_rests, queries, query_rests, full, empty, q_full, q_empty = shared
    tile = 0
    number = 0
    for index in range(gl.program_id(0), num_units, gl.num_programs(0)):
        unit, head = units + index // (H // PER_HEAD) * FIELDS, index % (H // PER_HEAD) * PER_HEAD
        start, stop = gl.load(unit + 1), gl.load(unit + 2)
        if start < stop:
            keys = gl.load(unit + 5) - gl.load(unit + 4)
            at = start if LAST else gl.load(unit) * num_rows + start
            q = number % QUERIES
            mbarrier.wait(q_full.index(q), (number // QUERIES) & 1)
            query, query_rest = queries.index(q * SIDES + SIDE), query_rests.index(q * SIDES + SIDE)
            top = gl.full([N], -float("inf"), gl.float32, gl.SliceLayout(0, S))
            total = gl.zeros([BLOCK, N], gl.float32, S)
            acc = gl.zeros([RANK, N], gl.float32, S)
            for first in range(0, gl.maximum(keys, 1), BLOCK):
                s = tile % STAGES
                block = blocks.index(s)
                mbarrier.wait(full.index(s), (tile // STAGES) & 1)
                logits = gl.zeros([BLOCK, N], gl.float32, S)
                logits = warpgroup_mma(
                    block, query.permute((1, 0)), logits, use_acc=False, is_async=True
                )
                logits = warpgroup_mma(
                    block_rests.index(s), query_rest.permute((1, 0)), logits, is_async=True
                )
                logits = warpgroup_mma_wait(0, deps=[logits])
                logits = gl.where(
                    (first + key < keys)[:, None], logits * (scale * LOG2E), -float("inf")
                )
                top, total, alpha = store_weights(logits, top, total, weights.index(SIDE))
                acc = acc * alpha[None, :]
                if first + BLOCK > keys:
                    clear_slots(block, keys - first)
                acc = warpgroup_mma(block.permute((1, 0)), weights.index(SIDE), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(s))
                tile += 1
            count = (stop - start) * PER_HEAD - SIDE * N
            write_results(top, total, acc, query, out, lses, at * H + head + SIDE * N, count)
            mbarrier.arrive(q_empty.index(q))
            number += 1


@gluon.jit(do_not_specialize=("num_units", "num_rows"))
def stream_units(
    latents,
    rotated,
    q,
    q_rotated,
    pages,
    units,
    out,
    lses,
    num_units,
    num_rows,
    scale,
    H: gl.constexpr,
    PER_HEAD: gl.constexpr,
    N: gl.constexpr,
    SIDES: gl.constexpr,
    QUERIES: gl.constexpr,
    LAST: gl.constexpr,
):
    """Attend the rows of units to latents; see `copy_units` and `compute_units`.

    Args:
        latents: Descriptor of the pool [slots, R + P], for blocks of latents.
        rotated: The same for their rotated numbers.
        q: Descriptor of the queries [T * H, R + P], for blocks of their first R numbers.
        q_rotated: The same for their rotated numbers.
        pages: Pointer to the page tables of all levels, concatenated.
        units: Pointer to the units; see `attend_units`.
        out: Pointer to the parts [parts, T, H, R] or, with LAST, the results [T, H, R].
        lses: Pointer to their natural LSEs.
        num_units: Number of units, times key heads.
        num_rows: T, the number of query rows.
        scale: Factor of the logits.
        H: Query heads.
        PER_HEAD: Query heads per key head.
        N: Folded rows of a side.
        SIDES: Groups of warps that share the folded rows of a unit.
        QUERIES: Units whose queries are in shared memory.
        LAST: Whether to write results instead of parts.
    """
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * N, 16, 2)
    blocks = gl.allocate_shared_memory(latents.dtype, [STAGES, BLOCK, RANK], WIDE)
    block_rests = gl.allocate_shared_memory(latents.dtype, [STAGES, BLOCK, ROTATED], WIDE)
    queries = gl.allocate_shared_memory(latents.dtype, [QUERIES * SIDES, N, RANK], WIDE)
    query_rests = gl.allocate_shared_memory(latents.dtype, [QUERIES * SIDES, N, ROTATED], WIDE)
    weights = gl.allocate_shared_memory(latents.dtype, [SIDES, BLOCK, N], NARROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=SIDES)
    for s in gl.static_range(QUERIES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=SIDES)
    fence_async_shared()
    # Blocks and queries each have a barrier that says that they have arrived, and one that says
    # that they may be overwritten.
    shared = (blocks, block_rests, queries, query_rests, full, empty, q_full, q_empty)
    sources = (latents, rotated, q, q_rotated)
    work = (units, num_units, num_rows)
    to = (out, lses, weights, scale)
    if SIDES == 1:
        gl.warp_specialize(
            [
                (compute_units, (to, work, shared, H, PER_HEAD, N, SIDES, QUERIES, LAST, 0)),
                (copy_units, (sources, pages, work, shared, H, PER_HEAD, N, SIDES, QUERIES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (compute_units, (to, work, shared, H, PER_HEAD, N, SIDES, QUERIES, LAST, 0)),
                (compute_units, (to, work, shared, H, PER_HEAD, N, SIDES, QUERIES, LAST, 1)),
                (copy_units, (sources, pages, work, shared, H, PER_HEAD, N, SIDES, QUERIES)),
            ],
            [WARPS, 1],
            [240, 24],
        )


def launch_stream(call: LayerCall, units: Tensor, out: Tensor, lses: Tensor, rows: int) -> None:
    """Attend the rows of units to latents.

    Args:
        call: The inputs of the layer; its queries are dense.
        units: The units [U, 9], each with at most `rows` query rows.
        out: The parts [parts, T, H, R], or the results [T, H, R], to be filled.
        lses: Their LSEs, to be filled.
        rows: Largest number of query rows of a unit.
    """
    q_THD, per_head = call.q_THD, call.per_head
    num_rows, q_heads, width = q_THD.shape
    columns = max(triton.next_power_of_2(rows * per_head), 16)
    sides = 2 if columns > 32 else 1
    columns //= sides

    def _describe(tensor: Tensor, height: int, numbers: int) -> TensorDescriptor:
        flat = tensor.view(-1, width)
        return TensorDescriptor.from_tensor(flat, [height, numbers], _SHARED)

    latents = call.keys[:, :, 0]
    num_units = len(units) * (q_heads // per_head)
    processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    stream_units[(min(num_units, processors),)](
        _describe(latents, BLOCK.value, RANK.value),
        _describe(latents, BLOCK.value, ROTATED.value),
        _describe(q_THD, columns, RANK.value),
        _describe(q_THD, columns, ROTATED.value),
        call.work.pages,
        units,
        out,
        lses,
        num_units,
        num_rows,
        call.options.scale,
        H=q_heads,
        PER_HEAD=per_head,
        N=columns,
        SIDES=sides,
        QUERIES=3 - sides,  # as many as fit into shared memory
        LAST=out.dim() == 3,
        num_warps=WARPS.value,
    )


_SHARED = gl.NVMMASharedLayout(128, 16, 2)
