"""Units of a level: consecutive rows with a run of keys that one attention call can compute.

A unit is "plain" if all its rows see all its keys, "causal" if N rows see N keys up to the
diagonal, and "masked" otherwise.

Legend: G groups, U units, T query rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from treegen.ops.attention.level import HostLevel, IntArray

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


def cut_units(level: HostLevel, positions_T: IntArray | None, window: int | None) -> IntArray:
    """Return the units [U, 7] of a level, without the keys that no row of a unit sees.

    Args:
        level: The level.
        positions_T: Position of each query row [T]; needed if the level is causal or there is a
            window.
        window: Number of positions that a row sees, its own included; None for all.
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
        first_G = np.minimum.reduceat(padded_T, bounds)[::2] - kv_start_G
        last_G = np.maximum.reduceat(padded_T, bounds)[::2] - kv_start_G
        if window is not None:
            low_G = np.clip(first_G - window + 1, 0, kv_len_G)
            mixed_G |= low_G < np.clip(last_G - window + 1, 0, kv_len_G)
        if level.causal:
            high_G = np.clip(last_G + 1, 0, kv_len_G)
            mixed_G |= np.clip(first_G + 1, 0, kv_len_G) < high_G
    seen_G = low_G < high_G
    columns = (row_G, stop_G - row_G, group_G, low_G, high_G, zero_G + PLAIN, zero_G)
    units_U7 = np.stack(columns, axis=1)[seen_G & ~mixed_G]
    if positions_T is None or not (seen_G & mixed_G).any():
        return units_U7
    rest = [
        unit
        for i in np.flatnonzero(seen_G & mixed_G)
        for unit in _cut_mixed(level, int(group_G[i]), positions_T, window)
    ]
    return np.concatenate([units_U7, np.array(rest, dtype=np.int64).reshape(-1, 7)])


def _cut_mixed(
    level: HostLevel, g: int, positions_T: IntArray, window: int | None
) -> Iterator[tuple[int, ...]]:
    """Cut a group whose rows see different keys."""
    start, stop, kv_len = int(level.start_G[g]), int(level.stop_G[g]), int(level.kv_len_G[g])
    offset_N = positions_T[start:stop] - level.kv_start_G[g]
    first, last = int(offset_N.min()), int(offset_N.max())
    n = stop - start
    in_order = bool((np.diff(offset_N) == 1).all())
    whole = window is None or last < window
    if in_order and whole and level.causal and first >= 0 and last < kv_len:
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
    level: HostLevel, g: int, row: int, offset_N: IntArray, window: int | None
) -> Iterator[tuple[int, ...]]:
    """Cut the keys of a block of rows into those that all rows see and those before and after.

    Each key before or after is hidden from some of the rows.
    """
    kv_len, n = int(level.kv_len_G[g]), offset_N.size
    first, last = int(offset_N.min()), int(offset_N.max())

    def clip(key: int) -> int:
        return min(max(key, 0), kv_len)

    low = 0 if window is None else clip(first - window + 1)
    low_all = 0 if window is None else clip(last - window + 1)
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
