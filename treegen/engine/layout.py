"""Turn segments and rows into the levels of one forward pass.

What is computed in one pass is a list of items, depth first: rows that decode one token, or spans
of tokens being prefilled. Items under one segment are consecutive, so each level is found by
comparing neighbours. Index arithmetic only; numpy.

Letters: N items, D levels of kept segments, G groups, P pages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treegen.attention import HostLevel
from treegen.cache.pool import Pages

Ints = NDArray[np.int64]


def shared_levels(
    chains_ND: Ints,
    offsets: Ints,
    keys_of: Callable[[int], tuple[Pages, int, int]],
) -> list[HostLevel]:
    """Levels of the kept segments above N items.

    chains_ND: [N, D] ids of the kept segments above each item, root first, -1 where there are no
    more. offsets: [N + 1] query rows of item n are offsets[n] to offsets[n + 1].
    keys_of: page table, number of keys and first position of a segment.
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
        levels.append(
            make_level(
                offsets[starts],
                offsets[stops],
                pad_tables([table for table, _, _ in keys]),
                np.array([num_keys for _, num_keys, _ in keys]),
                np.array([base for _, _, base in keys]),
                causal=False,
            )
        )
    return levels


def make_level(
    q_start: Ints, q_stop: Ints, pages: Pages, kv_len: Ints, kv_start: Ints, *, causal: bool
) -> HostLevel:
    """A level from arrays, which it keeps."""
    return HostLevel(
        start_G=np.asarray(q_start, dtype=np.int64),
        stop_G=np.asarray(q_stop, dtype=np.int64),
        pages_GP=np.asarray(pages, dtype=np.int64),
        kv_len_G=np.asarray(kv_len, dtype=np.int64),
        kv_start_G=np.asarray(kv_start, dtype=np.int64),
        causal=causal,
    )


def pad_tables(tables: list[Pages]) -> Pages:
    """Page tables side by side, [G, P], short ones filled up with page 0."""
    width = max(map(len, tables), default=0)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
