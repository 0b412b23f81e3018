"""Builds the attention levels of one forward pass from segments and rows.

A pass computes a list of items, depth first: rows that decode one token, or spans of tokens that
are prefilled. Items below one segment are consecutive, so comparing neighbours finds each level.

Letters: N items, D levels of cascaded segments, G groups, P pages, R items, T query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegen.ops.attention import HostLevel, Items
from treegen.ops.cache.pool import Pages

Ints = NDArray[np.int64]


def build_shared_levels(
    chains_ND: Ints | Pages,
    offsets: Ints,
    keys_of: Callable[[int], tuple[Pages, int, int]],
    copy_of: Callable[[int, int], Pages | None] | None = None,
) -> list[HostLevel]:
    """Return the levels of the cascaded segments above N items.

    Args:
        chains_ND: [N, D] indices of the cascaded segments above each item, root first, then -1.
        offsets: [N + 1]; the query rows of item n are offsets[n] to offsets[n + 1].
        keys_of: Returns the page table, the number of keys and the first position of a segment.
        copy_of: Returns the page blocks of a copy (`treegen.engine.features.expanded_kv`) for a
            segment and the number of rows below it; None if the segment's own pages are to be read.
            One depth may then have two levels. Default: no copies.
    """
    levels = []
    for ids in chains_ND.T:
        starts = np.flatnonzero(np.diff(ids, prepend=-2) != 0)
        stops = np.append(starts[1:], len(ids))
        used = ids[starts] >= 0
        starts, stops = starts[used], stops[used]
        if len(starts) == 0:
            break
        keys = [keys_of(int(segment)) for segment in ids[starts]]
        tables: list[Pages] = [table for table, _, _ in keys]
        copied = np.zeros(len(starts), dtype=np.bool_)
        if copy_of is not None:
            num_rows = offsets[stops] - offsets[starts]
            for group, segment in enumerate(ids[starts].tolist()):
                copy = copy_of(segment, int(num_rows[group]))
                if copy is not None:
                    tables[group], copied[group] = copy, True
        for of_copies in (False, True):
            groups = np.flatnonzero(copied == of_copies)
            if len(groups):
                level = make_level(
                    offsets[starts[groups]],
                    offsets[stops[groups]],
                    pad_tables([tables[group] for group in groups]),
                    np.array([keys[group][1] for group in groups]),
                    np.array([keys[group][2] for group in groups]),
                    causal=False,
                )
                if of_copies:
                    stored = pad_tables([keys[group][0] for group in groups])
                    level = replace(level, copied=True, stored_GP=stored.astype(np.int64))
                levels.append(level)
    return levels


def expand_offsets(num_R: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the layout of items with several consecutive query rows each.

    Args:
        num_R: Number of query rows of each item, [R].

    Returns:
        The offset of each item's query rows [R + 1], the item of each query row [T], and the index
        of each query row in its item [T].
    """
    offsets = np.concatenate([[0], num_R.cumsum()])
    row_T = np.repeat(np.arange(len(num_R)), num_R)
    return offsets, row_T, np.arange(len(row_T)) - offsets[row_T]


def make_level(
    q_start: Ints, q_stop: Ints, pages: Pages, kv_len: Ints, kv_start: Ints, *, causal: bool
) -> HostLevel:
    """Make a level of arrays, which are converted to int64.

    Args:
        q_start: First query row of each group, [G].
        q_stop: Query row after the last one of each group, [G].
        pages: Page table of each group, [G, P].
        kv_len: Number of keys of each group, [G].
        kv_start: Position of the first key of each group, [G].
        causal: Whether a query row sees only keys up to its own position.
    """
    arrays = (q_start, q_stop, pages, kv_len, kv_start)
    start_G, stop_G, pages_GP, kv_len_G, kv_start_G = (
        np.asarray(array, dtype=np.int64) for array in arrays
    )
    return HostLevel(start_G, stop_G, pages_GP, kv_len_G, kv_start_G, causal)


def expand_level(level: HostLevel, offsets: Ints, memo: dict[Any, Any] | None = None) -> HostLevel:
    """Return a level in which each item has several query rows instead of one.

    Args:
        level: The level of items with one query row each.
        offsets: Item i now has the query rows offsets[i] to offsets[i + 1].
        memo: Cache of values computed from the items. Default: the level's own.
    """
    start, stop = level.start_G, level.stop_G
    items = Items(offsets, start, stop, level.memo if memo is None else memo)
    return replace(level, start_G=offsets[start], stop_G=offsets[stop], memo={}, items=items)


def pad_tables(tables: Sequence[Pages | Sequence[int]], fill: int = 0) -> Pages:
    """Return page tables, or lists of other indices, as one array [G, P]; `fill` pads the rows."""
    width = max(map(len, tables), default=0)
    padded = np.full((len(tables), width), fill, dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
