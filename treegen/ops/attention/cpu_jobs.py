"""Jobs of the CPU, made from the units of a level: few calls, bounded padding, no needless copies.

A unit is consecutive rows with a run of keys that one attention call can compute. It is "plain" if
all its rows see all its keys, "causal" if N rows see N keys up to the diagonal, and "masked"
otherwise.

A unit with many consecutive keys becomes a job of its own and reads the pool in place. Other units
of one kind and row count are batched, and their keys are gathered token by token. A short unit is
padded with copies of its last key, so only slots that hold keys of the group are read.

Legend: U units, B units of a job, N rows of a unit, L keys of a unit with padding, G groups,
P page table entries, T query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treegen.ops.attention.level import HostLevel, IntArray
from treegen.ops.attention.types import Window

# Keys are gathered or converted this many bytes at a time, so that copies stay in the CPU cache and
# in memory that the allocator reuses. Page faults of larger new tensors cost more than attention.
CHUNK_BYTES: Final = 2 << 20
# This much padding costs about as much as one more call.
WASTE_BYTES: Final = 128 << 10
# From this size on, a separate call on keys in place is faster than gathering them into a batch.
VIEW_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class CpuShape:
    """Properties of a layer that a plan depends on, in addition to the level."""

    page_size: int
    token_bytes: int  # bytes of one key, in the type of the computation
    converts: bool  # whether the pool's type differs from that of the computation
    dtype: torch.dtype  # of the computation
    window: Window | None


@dataclass(frozen=True, slots=True, eq=False)
class CpuJob:
    """One attention call over B units of N rows each."""

    part: int
    """The partial result that the job writes."""
    rows: slice | Tensor
    """The query rows of all units."""
    num_units: int
    """Number of work units, B."""
    num_rows: int
    """Number of rows, N."""
    pieces: tuple[slice | Tensor, ...]
    """The keys, as runs of the pool or as slots [B * L] to gather. Results of several pieces are
    merged."""
    causal: bool
    """Whether row n of a unit sees its keys 0 to n only."""
    mask: Tensor | None
    """Added to the logits, [B, 1, 1 or N, L]."""
    keyless_BN: Tensor | None
    """Which rows see no key because of the mask; None if every row sees a key."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelPlan:
    """The jobs of a level. Each job writes to one part; the jobs of a part have disjoint rows."""

    jobs: tuple[CpuJob, ...]
    complete: tuple[bool, ...]
    """For each part, whether its jobs write every query row."""


def plan_level(
    level: HostLevel, positions_T: IntArray | None, num_rows: int, shape: CpuShape
) -> LevelPlan:
    """Plan the jobs of one level.

    Args:
        level: The level.
        positions_T: Position of each query row [T]; None if nothing needs positions.
        num_rows: T, the number of query rows.
        shape: Layer properties that the plan depends on.
    """
    units_U7 = cut_units(level, positions_T, shape.window)
    parts, units_U7[:, PART] = np.unique(units_U7[:, PART], return_inverse=True)
    rows_P = np.bincount(units_U7[:, PART], weights=units_U7[:, ROWS], minlength=parts.size)
    jobs = tuple(_jobs(level, units_U7, positions_T, shape))
    return LevelPlan(jobs, tuple(bool(rows == num_rows) for rows in rows_P))


def _jobs(
    level: HostLevel, units_U7: IntArray, positions_T: IntArray | None, shape: CpuShape
) -> Iterator[CpuJob]:
    length_U = units_U7[:, HIGH] - units_U7[:, LOW]
    in_place_U = _consecutive(level, units_U7, shape.page_size) & (
        (length_U * shape.token_bytes >= VIEW_BYTES) | (len(units_U7) == 1)
    )
    for unit in units_U7[in_place_U]:
        page, offset = divmod(int(unit[LOW]), shape.page_size)
        slot = int(level.pages_GP[unit[GROUP], page]) * shape.page_size + offset
        run = slice(slot, slot + int(unit[HIGH] - unit[LOW]))
        yield _job(level, unit[None], run, positions_T, shape)
    rest_U7 = units_U7[~in_place_U]
    length_U = rest_U7[:, HIGH] - rest_U7[:, LOW]
    same_U3 = rest_U7[:, [PART, KIND, ROWS]]
    order_U = np.lexsort((rest_U7[:, ROW], -length_U, *same_U3.T))
    rest_U7, length_U = rest_U7[order_U], length_U[order_U]
    same_U3 = rest_U7[:, [PART, KIND, ROWS]]
    edges = np.flatnonzero((same_U3[1:] != same_U3[:-1]).any(axis=1)) + 1
    for begin, end in zip([0, *edges], [*edges, len(rest_U7)], strict=True):
        while begin < end:
            count = _batch_size(length_U[begin:end], shape.token_bytes)
            units_B7 = rest_U7[begin : begin + count]
            units_B7 = units_B7[np.argsort(units_B7[:, ROW])]
            yield _gather_job(level, units_B7, positions_T, shape)
            begin += count


def _batch_size(length_U: IntArray, token_bytes: int) -> int:
    """Return how many of the units, sorted from longest to shortest, go into one call."""
    longest = int(length_U[0])
    max_units = max(1, CHUNK_BYTES // (longest * token_bytes))
    length_U = length_U[:max_units]
    waste_U = np.cumsum(longest - length_U)
    return int(np.searchsorted(waste_U, WASTE_BYTES // token_bytes, side="right"))


def _consecutive(level: HostLevel, units_U7: IntArray, page_size: int) -> npt.NDArray[np.bool_]:
    """Return whether the keys of each unit are in consecutive pages [U]."""
    breaks_GP = np.zeros(level.pages_GP.shape, dtype=np.int64)
    np.cumsum(np.diff(level.pages_GP, axis=1) != 1, axis=1, out=breaks_GP[:, 1:])
    g_U = units_U7[:, GROUP]
    first_U, last_U = units_U7[:, LOW] // page_size, (units_U7[:, HIGH] - 1) // page_size
    same: npt.NDArray[np.bool_] = breaks_GP[g_U, first_U] == breaks_GP[g_U, last_U]
    return same


def _slots(level: HostLevel, units_B7: IntArray, key_BL: IntArray, page_size: int) -> IntArray:
    """Return the pool slots [B, L] of keys that are counted from the first key of each unit."""
    key_BL = key_BL + units_B7[:, LOW, None]
    slots: IntArray = (
        level.pages_GP[units_B7[:, GROUP, None], key_BL // page_size] * page_size
        + key_BL % page_size
    )
    return slots


def _gather_job(
    level: HostLevel, units_B7: IntArray, positions_T: IntArray | None, shape: CpuShape
) -> CpuJob:
    length_B = units_B7[:, HIGH] - units_B7[:, LOW]
    key_BL = np.minimum(np.arange(length_B.max()), length_B[:, None] - 1)
    slot_S = _slots(level, units_B7, key_BL, shape.page_size).ravel()
    if slot_S[-1] - slot_S[0] == slot_S.size - 1 and (np.diff(slot_S) == 1).all():
        run = slice(int(slot_S[0]), int(slot_S[-1]) + 1)
        return _job(level, units_B7, run, positions_T, shape)
    return _job(level, units_B7, torch.from_numpy(slot_S), positions_T, shape)


def _job(
    level: HostLevel,
    units_B7: IntArray,
    keys: slice | Tensor,
    positions_T: IntArray | None,
    shape: CpuShape,
) -> CpuJob:
    num_units, n, kind = len(units_B7), int(units_B7[0, ROWS]), int(units_B7[0, KIND])
    row_B = units_B7[:, ROW]
    rows: slice | Tensor
    if (np.diff(row_B) == n).all():
        rows = slice(int(row_B[0]), int(row_B[0]) + num_units * n)
    else:
        rows = torch.from_numpy((row_B[:, None] + np.arange(n)).ravel())
    mask, keyless_BN = _mask(level, units_B7, positions_T, shape)
    single = num_units == 1 and kind == PLAIN
    return CpuJob(
        part=int(units_B7[0, PART]),
        rows=rows,
        num_units=num_units,
        num_rows=n,
        pieces=tuple(_pieces(keys, shape)) if single else (keys,),
        causal=kind == CAUSAL,
        mask=mask,
        keyless_BN=keyless_BN,
    )


def _pieces(keys: slice | Tensor, shape: CpuShape) -> Iterator[slice | Tensor]:
    """Cut the keys of a single unit into small chunks if they must be gathered or converted."""
    step = max(1, CHUNK_BYTES // shape.token_bytes)
    if isinstance(keys, Tensor):
        yield from keys.split(step)
    elif shape.converts:
        for start in range(keys.start, keys.stop, step):
            yield slice(start, min(start + step, keys.stop))
    else:
        yield keys


def _mask(
    level: HostLevel, units_B7: IntArray, positions_T: IntArray | None, shape: CpuShape
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask [B, 1, 1 or N, L] of a job, and which rows [B, N] see no key because of it.

    The mask hides padding and, in masked units, the keys that a row may not see.
    """
    length_B = units_B7[:, HIGH] - units_B7[:, LOW]
    key_L = np.arange(length_B.max())
    hidden_BNL = key_L >= length_B[:, None, None]
    if units_B7[0, KIND] == MASKED and positions_T is not None:
        g_B = units_B7[:, GROUP]
        row_BN = units_B7[:, ROW, None] + np.arange(units_B7[0, ROWS])
        key_BL = key_L + (units_B7[:, LOW] + level.kv_start_G[g_B])[:, None]
        position_BN1 = positions_T[row_BN][:, :, None]
        if level.causal:
            hidden_BNL = hidden_BNL | (key_BL[:, None] > position_BN1)
        if shape.window is not None:
            hidden_BNL = hidden_BNL | (key_BL[:, None] < shape.window.start(position_BN1))
    elif (length_B == length_B[0]).all():
        return None, None
    hidden = torch.from_numpy(hidden_BNL)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
    keyless_BN = hidden.all(dim=-1)
    return mask[:, None], keyless_BN if bool(keyless_BN.any()) else None


# Columns of a unit: first row, number of rows, group, first key, end of keys (exclusive), kind, and
# part. Units of one part have disjoint rows.
ROW, ROWS, GROUP, LOW, HIGH, KIND, PART = range(7)

PLAIN: Final = 0
CAUSAL: Final = 1
MASKED: Final = 2

# Largest number of rows of a mask. With a window, a block of rows also skips the keys that none of
# its rows sees.
BLOCK_ROWS: Final = 256
# Up to this many logits per head, one masked call is cheaper than several calls of which some need
# no mask.
SMALL_LOGITS: Final = 32 << 10


def cut_units(level: HostLevel, positions_T: IntArray | None, window: Window | None) -> IntArray:
    """Return the units [U, 7] of a level, without the keys that no row of a unit sees.

    Args:
        level: The level.
        positions_T: Position of each query row [T]; needed if the level is causal or there is a
            window.
        window: The positions that a row sees; None for all.
    """
    group_G = np.flatnonzero((level.stop_G > level.start_G) & (level.kv_len_G > 0))
    row_G, stop_G = level.start_G[group_G], level.stop_G[group_G]
    kv_len_G, kv_start_G = level.kv_len_G[group_G], level.kv_start_G[group_G]
    zero_G = np.zeros_like(row_G)
    low_G, high_G = zero_G, kv_len_G
    mixed_G = np.zeros(row_G.size, dtype=bool)
    if positions_T is not None and row_G.size and (level.causal or window is not None):
        # The last entry lets reduceat take a stop past the end.
        padded_T = np.append(positions_T, 0)
        bounds = np.stack([row_G, stop_G], axis=1).ravel()
        first_G = np.minimum.reduceat(padded_T, bounds)[::2]
        last_G = np.maximum.reduceat(padded_T, bounds)[::2]
        if window is not None:
            low_G = np.clip(window.start(first_G) - kv_start_G, 0, kv_len_G)
            mixed_G |= low_G < np.clip(window.start(last_G) - kv_start_G, 0, kv_len_G)
        if level.causal:
            high_G = np.clip(last_G - kv_start_G + 1, 0, kv_len_G)
            mixed_G |= np.clip(first_G - kv_start_G + 1, 0, kv_len_G) < high_G
    seen_G = low_G < high_G
    columns = (row_G, stop_G - row_G, group_G, low_G, high_G, zero_G + PLAIN, zero_G)
    units_U7 = np.stack(columns, axis=1)[seen_G & ~mixed_G]
    if positions_T is None or not (seen_G & mixed_G).any():
        return units_U7
    mixed_units = [
        unit
        for i in np.flatnonzero(seen_G & mixed_G)
        for unit in _cut_mixed(level, int(group_G[i]), positions_T, window)
    ]
    return np.concatenate([units_U7, np.array(mixed_units, dtype=np.int64).reshape(-1, 7)])


def _cut_mixed(
    level: HostLevel, g: int, positions_T: IntArray, window: Window | None
) -> Iterator[tuple[int, ...]]:
    """Cut a group whose rows see different keys."""
    start, stop, kv_len = int(level.start_G[g]), int(level.stop_G[g]), int(level.kv_len_G[g])
    origin = int(level.kv_start_G[g])
    offset_N = positions_T[start:stop] - origin
    first, last = int(offset_N.min()), int(offset_N.max())
    n = stop - start
    in_order = bool((np.diff(offset_N) == 1).all())
    sees_all = window is None or window.start(last + origin) <= origin
    if in_order and sees_all and level.causal and first >= 0 and last < kv_len:
        if first == 0:
            yield start, n, g, 0, n, CAUSAL, 0
            return
        if n * (last + 1) > SMALL_LOGITS:
            yield start, n, g, 0, first, PLAIN, 0
            yield start, n, g, first, first + n, CAUSAL, 1
            return
    for row in range(start, stop, BLOCK_ROWS):
        block_N = offset_N[row - start : row - start + BLOCK_ROWS]
        yield from _cut_block(level, g, row, block_N, window)


def _cut_block(
    level: HostLevel, g: int, row: int, offset_N: IntArray, window: Window | None
) -> Iterator[tuple[int, ...]]:
    """Cut the keys of a block of rows into those that all rows see and those before and after.

    Each key before or after is hidden from some of the rows.
    """
    kv_len, n = int(level.kv_len_G[g]), offset_N.size
    first, last = int(offset_N.min()), int(offset_N.max())

    def clip(key: int) -> int:
        return min(max(key, 0), kv_len)

    origin = int(level.kv_start_G[g])
    low = 0 if window is None else clip(window.start(first + origin) - origin)
    low_all = 0 if window is None else clip(window.start(last + origin) - origin)
    high = clip(last + 1) if level.causal else kv_len
    high_all = clip(first + 1) if level.causal else kv_len
    if low >= high:
        return
    if low == low_all and high == high_all:
        yield row, n, g, low, high, PLAIN, 0
    elif n * (high_all - low_all) <= SMALL_LOGITS:
        yield row, n, g, low, high, MASKED, 0
    else:
        yield row, n, g, low_all, high_all, PLAIN, 0
        if low < low_all:
            yield row, n, g, low, low_all, MASKED, 1
        if high_all < high:
            yield row, n, g, high_all, high, MASKED, 2
