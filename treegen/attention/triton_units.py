"""The work list of the Triton kernel: which rows meet which keys, split so that the GPU is full.

Letters: G groups, U units. A unit is at most BLOCK_M folded query rows and a run of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treegen.attention.level import HostLevel, IntArray

# Folded query rows of a unit. Groups that fit the first waste none of a matrix product's height;
# only large ones fill the last.
HEIGHTS = (16, 64, 128)
_TALL = 1024  # folded rows from which a group is cut into the tallest units
KEYS_PER_SPLIT = 256  # a split reads at least so many keys


@dataclass(frozen=True, slots=True)
class WorkList:
    """Units of all levels. units: [U, 8] for each of HEIGHTS; see `attend_units`.

    pages: the levels' page tables, one after another. complete: every row is written in every
    part, so that no part needs to be marked empty beforehand.
    """

    units: tuple[IntArray, ...]
    pages: IntArray
    num_parts: int
    complete: bool


def work_list(
    levels: Sequence[HostLevel], num_rows: int, kv_heads: int, per_head: int, num_programs: int
) -> WorkList:
    """Cut levels into units; few long ones are split over keys until num_programs are reached."""
    tables: list[list[IntArray]] = [[] for _ in HEIGHTS]
    part = offset = 0
    complete = True
    for level in levels:
        rows_G = level.stop_G - level.start_G
        used = (rows_G > 0) & (level.kv_len_G > 0)
        folded = rows_G * per_head
        kind_G = np.where(folded <= HEIGHTS[0], 0, np.where(folded < _TALL, 1, 2))
        blocks = [
            (into, used & (kind_G == kind), max(height // per_head, 1))
            for kind, (into, height) in enumerate(zip(tables, HEIGHTS, strict=True))
        ]
        units = sum(int((-(-rows_G[chosen] // height)).sum()) for _, chosen, height in blocks)
        longest = int(level.kv_len_G[used].max(initial=0))
        splits = 1
        if units and longest:
            wanted = -(-num_programs // (units * kv_heads))
            splits = max(1, min(wanted, longest // KEYS_PER_SPLIT))
        for into, chosen, height in blocks:
            if chosen.any():
                index = np.flatnonzero(chosen)
                into.append(_units(level, index, height, splits, part, offset))
        complete &= int(rows_G[used].sum()) == num_rows
        part += splits
        offset += level.pages_GP.size
    return WorkList(
        units=tuple(
            np.concatenate(into) if into else np.empty((0, 8), dtype=np.int64) for into in tables
        ),
        pages=np.concatenate([level.pages_GP.reshape(-1) for level in levels]),
        num_parts=part,
        complete=complete,
    )


def _units(
    level: HostLevel, index: IntArray, height: int, splits: int, part: int, offset: int
) -> IntArray:
    """Units of some groups of a level: row blocks of a height, times key splits."""
    rows, keys = level.stop_G[index] - level.start_G[index], level.kv_len_G[index]
    blocks = -(-rows // height)
    group = np.repeat(np.arange(len(index)), blocks)
    block = np.arange(len(group)) - np.repeat(blocks.cumsum() - blocks, blocks)
    start = level.start_G[index][group] + block * height
    stop = np.minimum(start + height, level.stop_G[index][group])
    split = np.arange(splits)[:, None]
    table = np.empty((splits, len(group), 8), dtype=np.int64)
    table[..., 0] = part + split
    table[..., 1], table[..., 2] = start, stop
    table[..., 3] = offset + index[group] * level.pages_GP.shape[1]
    table[..., 4] = keys[group] * split // splits
    table[..., 5] = keys[group] * (split + 1) // splits
    table[..., 6] = level.kv_start_G[index][group]
    table[..., 7] = level.causal
    return table.reshape(-1, 8)
