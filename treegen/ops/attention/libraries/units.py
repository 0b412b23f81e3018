"""Units of levels for library kernels that compute variable-length sequences.

A unit is a run of consecutive rows and a run of consecutive slots of the pool, read in place.
Either all its rows see all its keys, or it is causal: the last row sees up to the last key, and
each row before it one key less. A window then counts back from the last key that a row sees.

Legend: G groups, P used pages of all groups, R runs of slots, N rows of all runs, U units, T query
rows.
"""

from __future__ import annotations

import numpy as np

from treegen.ops.attention.level import HostLevel, IntArray

# Columns of a unit: first row, number of rows, first slot, number of keys, whether it is causal.
ROW, ROWS, SLOT, KEYS, CAUSAL = range(5)

_BLOCK_ROWS = 128  # rows that one block of a kernel computes
_KEYS_PER_SPLIT = 256  # smallest length to which runs are cut


def cut_level(
    level: HostLevel,
    page_size: int,
    longest: int,
    positions_T: IntArray | None,
    window: int | None,
    *,
    bands: bool,
) -> IntArray:
    """Return the units [U, 5] of a level.

    Args:
        level: The level.
        page_size: Cache slots per page.
        longest: Largest number of pages of a unit.
        positions_T: Position of each query row [T]; needed if the level is causal or there is a
            window.
        window: Number of positions that a row sees, its own included; None for all.
        bands: Whether a causal unit may have a window that hides keys. If not, each row from which
            the window hides other keys becomes a separate unit.
    """
    runs_R6 = _runs(level, page_size, longest)
    if positions_T is None or not (level.causal or window is not None):
        return runs_R6[:, :5]
    row, rows, slot, keys, _, position = runs_R6.T
    run_N = np.repeat(np.arange(len(runs_R6)), rows)
    row_N = concat_ranges(row, rows)
    # N counts rows of runs. place_N is the position of the row, counted from the first key of its
    # run. The row sees the keys of the run from low_N up to, not including, high_N.
    place_N = positions_T[row_N] - position[run_N]
    high_N = np.clip(place_N + 1, 0, keys[run_N]) if level.causal else keys[run_N]
    low_N = np.zeros_like(high_N) if window is None else np.maximum(place_N + 1 - window, 0)
    seen = low_N < high_N
    run_N, row_N, place_N, low_N, high_N = (
        array[seen] for array in (run_N, row_N, place_N, low_N, high_N)
    )
    # Which keys of the same run the next row sees: 1 the same keys; 2 one key more; 0 otherwise.
    near = (np.diff(run_N) == 0) & (np.diff(row_N) == 1)
    lower, higher = np.diff(low_N), np.diff(high_N)
    step = near & (np.diff(place_N) == 1) & (higher == 1) & (high_N[1:] == place_N[1:] + 1)
    kind = 2 * (step if bands else step & (lower == 0)) + (near & (lower == 0) & (higher == 0))
    ends = kind == 0
    ends[1:] |= (kind[1:] != kind[:-1]) & (kind[:-1] != 0)
    first_U = np.flatnonzero(np.append(True, ends)[: len(row_N)])
    last_U = np.append(first_U[1:], len(row_N))[: len(first_U)] - 1
    causal_U = (first_U < last_U) & (np.append(kind, 0)[first_U] == 2)
    low_U = low_N[first_U]
    columns = (
        row_N[first_U],
        last_U - first_U + 1,
        slot[run_N[first_U]] + low_U,
        high_N[last_U] - low_U,
        causal_U,
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _runs(level: HostLevel, page_size: int, longest: int) -> IntArray:
    """Return runs of consecutive pages as units, with the position of the first key: [R, 6]."""
    rows_G = level.stop_G - level.start_G
    used_G = np.where(rows_G > 0, -(-level.kv_len_G // page_size), 0)
    group_P = np.repeat(np.arange(len(used_G)), used_G)
    index_P = concat_ranges(np.zeros_like(used_G), used_G)
    page_P = level.pages_GP[group_P, index_P]
    starts = index_P % longest == 0  # true for the first page of each group too
    starts[1:] |= np.diff(page_P) != 1
    at_R = np.flatnonzero(starts)
    group_R, low_R = group_P[at_R], index_P[at_R] * page_size
    pages_R = np.diff(np.append(at_R, len(page_P)))
    keys_R = np.minimum(pages_R * page_size, level.kv_len_G[group_R] - low_R)
    columns = (
        level.start_G[group_R],
        rows_G[group_R],
        page_P[at_R] * page_size,
        keys_R,
        np.zeros_like(keys_R),
        level.kv_start_G[group_R] + low_R,
    )
    return np.stack(columns, axis=1)


def pages_per_unit(
    level: HostLevel, page_size: int, per_head: int, kv_heads: int, num_programs: int
) -> int:
    """Return the largest number of pages of a unit, so that long groups are cut to fill the device.

    Args:
        level: The level.
        page_size: Cache slots per page.
        per_head: Query heads per key head.
        kv_heads: Key heads.
        num_programs: Number of blocks that fill the device.
    """
    blocks = kv_heads * int((-(-(level.stop_G - level.start_G) * per_head // _BLOCK_ROWS)).sum())
    splits = max(num_programs // max(blocks, 1), 1)
    keys = max(-(-int(level.kv_len_G.max(initial=0)) // splits), _KEYS_PER_SPLIT)
    return -(-keys // page_size)


def concat_ranges(start: IntArray, count: IntArray) -> IntArray:
    """Return the ranges of `count` numbers from each `start`, concatenated."""
    return np.arange(count.sum()) + np.repeat(start - (count.cumsum() - count), count)


def count_earlier(values: IntArray) -> IntArray:
    """Return, for each value, how many equal values precede it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    counts = np.empty_like(values)
    counts[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return counts
