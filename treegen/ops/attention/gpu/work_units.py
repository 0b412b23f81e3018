"""Work lists of the Triton kernel: which rows read which keys, split so that the GPU is busy.

A unit is at most BLOCK_M folded query rows and a run of keys. (The query heads of a key head are
folded into rows.) Legend: G groups, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from treegen.ops.attention.level import HostLevel, IntArray, memoize

# Folded query rows of a unit: 1 needs no matrix product, and a matrix product has at least 16. With
# few rows, single rows use matrix products too: Triton loads keys ahead for these only.
HEIGHTS = (1, 16, 64, 128)
_COSTS = (1.0, 1.6, 2.5)  # approximate relative cost of a key in a unit of the last three heights
_PROGRAMS = (4, 4, 2, 2)  # programs of each height that keep a multiprocessor busy
_KEYS_PER_SPLIT = 256  # smallest number of keys in a split
KEYS_PER_SPLIT_FEW = 128  # the same with few rows
_KEYS_PER_FIRST_SPLIT = 1024  # the same where one program per processor would be enough
_MAX_SPLITS_FEW = 16  # largest number of splits with few rows, a power of two
KEY_BLOCK = 64  # units start at multiples of this, so that blocks of keys do not straddle pages
# The numbers that describe a unit, in the order in which kernels load them: part, first row, end of
# rows, offset of the page table, first key, end of keys, position of key 0, whether the level is
# causal, and page of the first key. Ends are exclusive.
PART_AT, START, STOP, TABLE, LOW, HIGH, ORIGIN, CAUSAL, PAGE = range(9)
UNIT = 9
NO_UNITS = np.empty((0, UNIT), dtype=np.int64)
_MAX_MERGED = 4  # largest number of parts that the last launch merges
_MAX_MERGED_FEW = 16  # the same with few rows
_FEW_PROGRAMS = (8, 2)  # largest number of programs of a multiprocessor that are few, by height
_STREAM_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)  # few, so that long runs need few CUDA graphs
_KEYS_TO_START = 128  # keys that a stream could read while it starts and writes its results


@dataclass(frozen=True, slots=True)
class WorkShape:
    """Properties of a layer on which a work list depends, in addition to the levels."""

    num_rows: int
    """Number of query rows, including padding rows, whose results are not used."""
    kv_heads: int
    """Number of key heads."""
    per_head: int
    """Query heads per key head."""
    page_size: int
    """Cache slots per page."""
    may_be_dense: bool
    """Whether the dense kernel supports the layer's tensors and options."""
    max_height: int = HEIGHTS[-1]
    """Largest number of folded query rows of a unit that fits into the GPU's memory."""
    merges: int = HEIGHTS[1]
    """Largest number of query heads per key head with which the last launch merges parts."""
    streamed: bool = False
    """Whether units are streams of latents; see `stream_kernels`."""
    tunes_few: bool = True
    """Whether launches of few programs have a tuning of their own; see `choose_tuning`."""
    is_wide: bool = False
    """Whether heads have more than 128 numbers; see `tuning.is_wide`."""

    def has_few_rows(self, processors: int) -> bool:
        """Return whether single rows are few programs, for which there is a tuning."""
        return self.tunes_few and are_few(self.num_rows * self.kv_heads, 1, processors)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Units of all levels."""

    units: tuple[IntArray, ...]
    """The units of each launch [U, 9]; see `attend_units`."""
    kinds: tuple[int, ...]
    """For each launch, the index of its height in HEIGHTS."""
    pages: IntArray
    """The levels' page tables, concatenated."""
    num_parts: int
    """Number of partial results in memory, without the last launch's own."""
    causal: bool
    """Whether any level is causal."""
    last: IntArray = field(default_factory=lambda: NO_UNITS)
    """Units of the level whose launch merges, one per row; empty if no launch merges."""
    last_kind: int = 0
    """The index of the height of `last`."""
    complete: bool = False
    """Whether every part that is merged is written, so that none must be marked as empty
    first."""
    sees_all: tuple[bool, ...] = ()
    """In batch-invariant attention, for each launch, whether rows see all keys of their units
    without a window."""


def are_few(programs: int, kind: int, processors: int, *, fill_processors: bool = False) -> bool:
    """Return whether each program of a launch has to be fast by itself, with large blocks of keys.

    With more programs, each multiprocessor computes one while others wait for memory.

    Args:
        programs: Number of programs.
        kind: Index of the units' height in HEIGHTS.
        processors: Multiprocessors of the GPU.
        fill_processors: Whether a multiprocessor has registers for only one or two programs with
            large blocks, so that only one program counts as few.
    """
    if kind >= len(_FEW_PROGRAMS):
        return False
    return programs <= (1 if fill_processors else _FEW_PROGRAMS[kind]) * processors


def build_work_list(
    levels: Sequence[HostLevel],
    shape: WorkShape,
    live_rows: int,
    processors: int,
    dense_keys: tuple[int, int] = (-1, 0),
) -> WorkList:
    """Cut levels into units, and split the keys of few long units to keep all processors busy.

    Args:
        levels: The levels.
        shape: Layer properties on which the list depends.
        live_rows: Number of query rows without padding.
        processors: Multiprocessors of the GPU.
        dense_keys: Index of the level whose first keys the dense kernel reads, and the number of
            these keys. Default: no level.
    """
    tables: list[list[IntArray]] = [[] for _ in HEIGHTS]
    last, last_kind = NO_UNITS, 0
    part = offset = 0
    complete = True
    for index, level in enumerate(levels):
        first_key = dense_keys[1] if index == dense_keys[0] else 0
        cut = _cut_of(level, first_key, shape, processors)
        max_merged = _MAX_MERGED_FEW if shape.has_few_rows(processors) else _MAX_MERGED
        max_merged = 0 if shape.streamed else max_merged
        may_merge = cut.splits == 1 and part <= max_merged and shape.per_head <= shape.merges
        is_last = index == len(levels) - 1 and not first_key
        if is_last and may_merge and cut.is_flat:
            last_kind = 0 if shape.per_head == 1 and not shape.has_few_rows(processors) else 1
            last = _one_unit_per_row(level, shape.num_rows, live_rows, part, offset)
        elif cut.num_rows:
            size = shape.page_size
            key = "units", part, offset, first_key, size, cut.kind, cut.height, cut.splits
            arguments = level, cut, part, offset, first_key, size
            tables[cut.kind].append(memoize(level.memo, key, partial(_units, *arguments)))
            complete &= cut.num_rows == live_rows
            part += cut.splits
        offset += level.pages_GP.size
    return WorkList(
        units=tuple(np.concatenate(into) if into else NO_UNITS for into in tables),
        kinds=tuple(range(len(HEIGHTS))),
        last=last,
        last_kind=last_kind,
        pages=np.concatenate([level.pages_GP.reshape(-1) for level in levels]),
        num_parts=part,
        # A separate merge kernel does not know which rows are live.
        complete=complete and len(last) > 0,
        causal=any(level.causal for level in levels),
    )


@dataclass(frozen=True, slots=True)
class _LevelTiling:
    """The division of a level into units."""

    kind: int
    """Index of the units' height in HEIGHTS."""
    height: int
    """Query rows per unit."""
    splits: int
    """Number of splits of the keys."""
    groups: IntArray
    """Indices of the groups that have rows and keys."""
    num_rows: int
    """Number of rows of these groups."""
    is_flat: bool
    """Whether no group has more than one row."""


def _cut_of(level: HostLevel, first_key: int, shape: WorkShape, processors: int) -> _LevelTiling:
    sizes = shape.kv_heads, shape.per_head, processors, shape.max_height
    options = shape.streamed, shape.is_wide, shape.has_few_rows(processors)
    key = "cut", first_key, *sizes, *options
    return memoize(level.memo, key, partial(_cut, level, first_key, shape, processors))


def _cut(level: HostLevel, first_key: int, shape: WorkShape, processors: int) -> _LevelTiling:
    per_head = shape.per_head
    rows_G, keys_G = level.stop_G - level.start_G, level.kv_len_G - first_key
    groups = np.flatnonzero((rows_G > 0) & (keys_G > 0))
    rows, keys = rows_G[groups], keys_G[groups]
    is_flat = int(rows_G.max(initial=0)) <= 1
    kind = kind_of(rows * per_head, keys, shape.max_height)
    if shape.has_few_rows(processors):
        kind = max(kind, 1)
    if shape.streamed:  # a unit takes as long as its block of latents, if it has few rows
        kind = 1 if is_flat else 2
    height = max(HEIGHTS[kind] // per_head, 1)
    splits = splits_of(rows, keys, kind, shape, processors)
    return _LevelTiling(kind, height, splits, groups, int(rows.sum()), is_flat)


def splits_of(rows: IntArray, keys: IntArray, kind: int, shape: WorkShape, processors: int) -> int:
    """Return the number of splits of the keys that keeps all processors busy.

    With few rows, the number is a power of two, so that long runs need few CUDA graphs.

    Args:
        rows: Number of query rows of each group.
        keys: Number of keys of each group.
        kind: Index of the units' height in HEIGHTS.
        shape: Layer properties on which the list depends.
        processors: Multiprocessors of the GPU.
    """
    if not len(rows):
        return 1
    height = max(HEIGHTS[kind] // shape.per_head, 1)
    programs = int((-(-rows // height)).sum()) * shape.kv_heads
    if shape.streamed:
        return _stream_splits(programs, int(keys.max()), processors)
    num_splits = _PROGRAMS[kind] * processors // programs
    if not shape.has_few_rows(processors):
        return max(1, min(num_splits, int(keys.max()) // _KEYS_PER_SPLIT))
    longest, least = int(keys.max()), KEYS_PER_SPLIT_FEW
    share = processors // programs
    if kind == 1 and shape.is_wide and share < _PROGRAMS[kind]:
        least = _KEYS_PER_SPLIT  # several programs per processor, with small blocks
    elif kind == 1:
        num_splits = share
        if rows.max() == 1 and not shape.is_wide:
            # A second program per processor, if there are enough keys. More of them are needed if
            # the level is not split otherwise, because a split level takes a separate merge.
            keys_of_second = _KEYS_PER_SPLIT if share > 1 else _KEYS_PER_FIRST_SPLIT
            num_splits = max(share, min(2 * share, longest // keys_of_second))
    num_splits = max(1, min(num_splits, longest // least, _MAX_SPLITS_FEW))
    return 1 << (num_splits.bit_length() - 1)


def _stream_splits(units: int, keys: int, processors: int) -> int:
    """Return the number of splits with which streams end first, one on each processor."""

    def cost(splits: int) -> float:
        rounds = -(-units * splits // processors)
        return rounds * (keys / splits + _KEYS_TO_START)

    possible = [splits for splits in _STREAM_SPLITS if splits * KEY_BLOCK <= keys]
    return min(possible, key=cost, default=1)


def kind_of(folded_G: IntArray, keys_G: IntArray, max_height: int) -> int:
    """Return the index of the cheapest height for a level, the same for all of its groups.

    Each height is a separate launch, and the set of launches is part of a CUDA graph.

    Args:
        folded_G: Number of folded query rows of each group [G].
        keys_G: Number of keys of each group [G].
        max_height: Largest height that may be chosen.
    """
    if folded_G.max(initial=0) <= HEIGHTS[0]:
        return 0
    costs = [
        cost * int((-(-folded_G // height) * keys_G).sum())
        for height, cost in zip(HEIGHTS[1:], _COSTS, strict=True)
        if height <= max_height
    ]
    return 1 + int(np.argmin(costs))


def _one_unit_per_row(
    level: HostLevel, num_rows: int, live_rows: int, num_parts: int, offset: int
) -> IntArray:
    """Return one unit per row, for a level whose groups have at most one row [num_rows, 9].

    Rows outside all groups get units without keys. The first number of a unit is the number of
    parts with which its row is merged, instead of a part: 0 for padding rows.
    """
    table = np.zeros((num_rows, UNIT), dtype=np.int64)
    table[:live_rows, PART_AT] = num_parts
    table[:, START] = np.arange(num_rows)
    table[:, STOP] = table[:, START] + 1
    group = np.flatnonzero(level.stop_G > level.start_G)
    row = level.start_G[group]
    table[row, TABLE] = offset + group * level.pages_GP.shape[1]
    table[row, HIGH] = level.kv_len_G[group]
    table[row, ORIGIN] = level.kv_start_G[group]
    table[row, CAUSAL] = level.causal
    table[row, PAGE] = level.pages_GP[group, 0] if level.pages_GP.shape[1] else 0
    return table


def _units(
    level: HostLevel, cut: _LevelTiling, part: int, offset: int, first_key: int, page_size: int
) -> IntArray:
    """Return units of a level [U, 9]: blocks of `cut.height` rows, times splits of the keys."""
    index, height = cut.groups, cut.height
    rows = level.stop_G[index] - level.start_G[index]
    blocks = -(-rows // height)
    group = np.repeat(np.arange(len(index)), blocks)
    block = np.arange(len(group)) - np.repeat(blocks.cumsum() - blocks, blocks)
    start = level.start_G[index][group] + block * height
    table = table_of(level, index[group], cut.splits, part, offset, first_key, page_size)
    table[..., START] = start
    table[..., STOP] = np.minimum(start + height, level.stop_G[index][group])
    return table.reshape(-1, UNIT)


def table_of(
    level: HostLevel,
    groups: IntArray,
    splits: int,
    part: int,
    offset: int,
    first_key: int,
    page_size: int,
) -> IntArray:
    """Return units of groups [splits, groups, 9], whose rows the caller must set.

    Args:
        level: The level.
        groups: Group of each unit.
        splits: Number of splits of the keys.
        part: Number of the part that the first split writes.
        offset: Offset of the level's page table in the concatenated page tables.
        first_key: First key that the units read.
        page_size: Cache slots per page.
    """
    keys, width = level.kv_len_G[groups], level.pages_GP.shape[1]
    table = np.empty((splits, len(groups), UNIT), dtype=np.int64)
    table[..., TABLE] = offset + groups * width
    table[..., ORIGIN] = level.kv_start_G[groups]
    table[..., CAUSAL] = level.causal
    if splits == 1:
        table[..., PART_AT], table[..., LOW], table[..., HIGH] = part, first_key, keys
        table[..., PAGE] = level.pages_GP[groups, min(first_key // page_size, width - 1)]
        return table
    split = np.arange(splits)[:, None]
    key_blocks = -(-(keys - first_key) // KEY_BLOCK)
    low, high = (first_key + key_blocks * at // splits * KEY_BLOCK for at in (split, split + 1))
    table[..., PART_AT] = part + split
    table[..., LOW] = low
    table[..., HIGH] = np.minimum(high, keys)
    # A split of a short group may have no keys.
    page = np.minimum(low // page_size, width - 1)
    table[..., PAGE] = level.pages_GP[groups, page]
    return table
