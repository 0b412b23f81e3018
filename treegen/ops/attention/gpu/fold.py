"""Work lists of attention that folds keys in, one for each level, launched in order.

The positions of keys alone determine where keys are cut, and to which part their sums belong.

Legend: G groups, U units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.ops.attention.gpu.units import (
    CAUSAL,
    HEIGHTS,
    HIGH,
    LOW,
    ORIGIN,
    PART_AT,
    START,
    STOP,
    TABLE,
    UNIT,
    WorkList,
    WorkShape,
    kind_of,
)
from treegen.ops.attention.level import HostLevel, IntArray

PART = 4096  # positions of a part, whose keys are summed sequentially
_TALL = HEIGHTS[-1]


def build_fold_list(levels: Sequence[HostLevel], shape: WorkShape, processors: int) -> WorkList:
    """Cut levels into units: row blocks of one height per level, times the parts of their keys.

    Args:
        levels: The levels.
        shape: Layer properties on which the list depends.
        processors: Multiprocessors of the GPU.
    """
    tables, kinds = [], []
    offset, parts = 0, 1
    for index, level in enumerate(levels):
        key = "fold", shape.kv_heads, shape.per_head, processors, shape.tallest, offset
        if key not in level.memo:
            kind = _kind_of(level, shape, processors)
            level.memo[key] = _units(level, kind, shape.per_head, offset), kind
        table, kind = level.memo[key]
        parts = max(parts, int(table[:, PART_AT].max(initial=0)) + 1)
        if index == len(levels) - 1:
            table = np.concatenate([table, _idle_rows(table, shape.num_rows)])
        tables.append(table)
        kinds.append(kind)
        offset += level.pages_GP.size
    return WorkList(
        units=tuple(tables),
        kinds=tuple(kinds),
        last=np.empty((0, UNIT), dtype=np.int64),
        last_kind=0,
        pages=np.concatenate([level.pages_GP.reshape(-1) for level in levels]),
        num_parts=parts,
        complete=False,
        causal=any(level.causal for level in levels),
    )


def _kind_of(level: HostLevel, shape: WorkShape, processors: int) -> int:
    """Return the index of the height of a level's units; the height does not affect any bit."""
    rows_G, keys_G = level.stop_G - level.start_G, level.kv_len_G
    groups = (rows_G > 0) & (keys_G > 0)
    rows_G, keys_G = rows_G[groups], keys_G[groups]
    # Units of fewer than 16 rows use no matrix product, and would sum in another order.
    kind = max(kind_of(rows_G * shape.per_head, keys_G, shape.tallest), 1)
    blocks = int((-(-rows_G // max(HEIGHTS[kind] // shape.per_head, 1))).sum())
    parts = -(-int((level.kv_start_G[groups] + keys_G).max(initial=1)) // PART)
    # Keys are not split further, so few tall units would leave most processors idle.
    if HEIGHTS[kind] == _TALL and blocks * shape.kv_heads * parts < processors:
        return kind - 1
    return kind


def _units(level: HostLevel, kind: int, per_head: int, offset: int) -> IntArray:
    """Return the units of a level [U, 9], all of one height."""
    rows_G, keys_G, origin_G = level.stop_G - level.start_G, level.kv_len_G, level.kv_start_G
    groups = np.flatnonzero((rows_G > 0) & (keys_G > 0))
    height = max(HEIGHTS[kind] // per_head, 1)
    group, block = _repeat(groups, -(-rows_G[groups] // height))
    first, last = origin_G[group] // PART, (origin_G + keys_G - 1)[group] // PART
    at, part = _repeat(np.arange(len(group)), last - first + 1)
    group, block, part = group[at], block[at], part + first[at]
    table = np.zeros((len(group), UNIT), dtype=np.int64)
    table[:, PART_AT] = part
    table[:, START] = level.start_G[group] + block * height
    table[:, STOP] = np.minimum(table[:, START] + height, level.stop_G[group])
    table[:, TABLE] = offset + group * level.pages_GP.shape[1]
    table[:, LOW] = np.maximum(part * PART - origin_G[group], 0)
    table[:, HIGH] = np.minimum((part + 1) * PART - origin_G[group], keys_G[group])
    table[:, ORIGIN] = origin_G[group]
    table[:, CAUSAL] = level.causal
    return table


def _repeat(values: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Repeat each value `counts` times; also return the index of each repetition."""
    again = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(values, counts), again


def _idle_rows(table: IntArray, num_rows: int) -> IntArray:
    """Return a unit without keys for each row that has no unit in a table.

    The last launch then writes the results of levels above for these rows too.
    """
    covered = np.zeros(num_rows + 1, dtype=np.int64)
    np.add.at(covered, table[:, START], 1)
    np.add.at(covered, table[:, STOP], -1)
    rows = np.flatnonzero(covered[:-1].cumsum() == 0)
    idle = np.zeros((len(rows), UNIT), dtype=np.int64)
    idle[:, START], idle[:, STOP] = rows, rows + 1
    return idle
