"""Work lists of passes whose items have different numbers of query rows in each pass.

Everything that does not depend on these numbers is planned once, for entries: an item or a group of
items, times the splits of its keys. A pass then only cuts each entry's rows into blocks, because
the GPU waits meanwhile.

Legend: G groups, E entries, U units, R ends of items.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.ops.attention.gpu.work_units import (
    HEIGHTS,
    KEYS_PER_SPLIT_FEW,
    NO_UNITS,
    START,
    STOP,
    UNIT,
    WorkList,
    WorkShape,
    kind_of,
    splits_of,
    table_of,
)
from treegen.ops.attention.level import HostLevel, IntArray, Items, memoize

_FEW_KEYS = 2048  # keys of a group up to which all passes use the same height of units


def are_ragged(levels: Sequence[HostLevel]) -> bool:
    """Return whether all levels of a pass list their items."""
    return all(level.items is not None for level in levels)


def build_ragged_list(levels: Sequence[HostLevel], shape: WorkShape, processors: int) -> WorkList:
    """Build a work list like `build_work_list`, for levels that have items.

    Heights and splits follow from `shape.num_rows`, not from the rows of each item. So they are the
    same for all passes that one CUDA graph computes.

    Args:
        levels: The levels, all with the same items.
        shape: Layer properties on which the list depends.
        processors: Multiprocessors of the GPU.
    """
    entries: list[list[IntArray]] = [[] for _ in HEIGHTS]
    part = offset = 0
    for level in levels:
        table, kind, splits = _entries(level, part, offset, shape, processors)
        if len(table):
            entries[kind].append(table)
            part += splits
        offset += level.pages_GP.size
    items = levels[0].items
    assert items is not None
    return WorkList(
        units=tuple(
            _cut(into, items.offsets, max(height // shape.per_head, 1))
            for into, height in zip(entries, HEIGHTS, strict=True)
        ),
        kinds=tuple(range(len(HEIGHTS))),
        pages=np.concatenate([level.pages_GP.reshape(-1) for level in levels]),
        num_parts=part,
        causal=any(level.causal for level in levels),
    )


def _entries(
    level: HostLevel, part: int, offset: int, shape: WorkShape, processors: int
) -> tuple[IntArray, int, int]:
    """Return entries of a level, with items instead of rows; and the units' kind and splits."""
    items = level.items
    assert items is not None
    if level.causal:
        # An item's own keys grow from pass to pass, and it always has at least one.
        size = int(level.kv_len_G.max(initial=0)) // KEYS_PER_SPLIT_FEW
        groups, kind, splits = memoize(
            items.memo,
            ("own", size, shape, processors),
            lambda: _shape_of(level, items, shape, processors),
        )
        return _table(level, items, groups, splits, part, offset, shape.page_size), kind, splits

    def make() -> tuple[IntArray, int, int]:
        groups, kind, splits = _shape_of(level, items, shape, processors)
        table = _table(level, items, groups, splits, part, offset, shape.page_size)
        return table, kind, splits

    return memoize(items.memo, ("shared", part, offset, shape, processors), make)


def _shape_of(
    level: HostLevel, items: Items, shape: WorkShape, processors: int
) -> tuple[IntArray, int, int]:
    """Return the groups that have items and keys, the kind of units, and the splits.

    Many kinds of passes share few combinations, because each combination needs another CUDA graph.
    """
    num_G = items.stop_G - items.start_G
    groups = np.flatnonzero((num_G > 0) & (level.kv_len_G > 0))
    keys = level.kv_len_G[groups]
    rows = -(-num_G[groups] * shape.num_rows // items.num)
    kind, max_height = 1, shape.max_height
    if int(keys.max(initial=0)) > _FEW_KEYS:
        folded = (1 << np.ceil(np.log2(rows)).astype(np.int64)) * shape.per_head
        kind = max(kind_of(folded, keys, max_height), 1)
    elif not level.causal:
        # The same height in all passes matters more than the best height in each.
        one = np.array([shape.num_rows])
        kind = max(kind_of(one * shape.per_head, one, max_height), 1)
    splits = splits_of(rows, keys, kind, shape, processors)
    low = 1 << (splits.bit_length() - 1)
    return groups, kind, low + low // 2 if splits >= low + low // 2 else low


def _table(
    level: HostLevel,
    items: Items,
    groups: IntArray,
    splits: int,
    part: int,
    offset: int,
    page_size: int,
) -> IntArray:
    table = table_of(level, groups, splits, part, offset, 0, page_size)
    table[..., START], table[..., STOP] = items.start_G[groups], items.stop_G[groups]
    return table.reshape(-1, UNIT)


def _cut(entries: Sequence[IntArray], offsets_R: IntArray, height: int) -> IntArray:
    """Return units of entries: blocks of the rows that belong to their items."""
    if not entries:
        return NO_UNITS
    table_E = entries[0] if len(entries) == 1 else np.concatenate(entries)
    start_E, stop_E = offsets_R[table_E[:, START]], offsets_R[table_E[:, STOP]]
    blocks_E = (stop_E - start_E + (height - 1)) // height
    entry_U = np.repeat(np.arange(len(table_E)), blocks_E)
    first_E = start_E - (blocks_E.cumsum() - blocks_E) * height
    table = table_E[entry_U]
    table[:, START] = start_U = first_E[entry_U] + np.arange(len(entry_U)) * height
    np.minimum(start_U + height, stop_E[entry_U], out=table[:, STOP])
    return table
