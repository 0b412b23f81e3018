"""Selecting the keys that a row attends to, in layers with sparse attention.

An indexer gives each token a short key, and each row short queries with a weight for each head. The
score of a key for a row is the weighted sum, over the heads, of the positive parts of their
products. A row attends to the keys with the highest scores. Among equal scores, earlier keys are
selected first on a CPU. On a GPU, `torch.topk` selects any of them.

The index keys of a group with many rows are scored by one matrix product. Groups with few rows are
scored together. Each row then has the scores of all of its keys, in order of their positions, so
its selection is exact whatever the levels are.

Legend: T query rows, H heads of the indexer, D numbers of an index key, G groups, P pages of a
group, N some rows, L keys, S selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.ops.attention.level import HostLevel, IntArray
from treegen.ops.attention.types import PreparedLevels

PIECE: Final = 2**25
"""Maximum numbers in a temporary tensor."""
WIDE: Final = 8
"""Minimum rows of a group that is computed by a product of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A group of a level with at least `WIDE` rows."""

    start: int
    """Its first row."""
    stop: int
    """The row after its last row."""
    slots_L: Tensor
    """The cache slots of its keys."""
    first: int
    """The position of its first key."""
    causal: bool
    """Whether a row sees only keys up to its own position."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelKeys:
    """The keys of one level, by query row."""

    groups: tuple[Group, ...]
    """The wide groups."""
    pages_GP: Tensor
    """The page table of each group."""
    group_T: Tensor
    """The group of each row; 0 for a row outside all groups."""
    first_T: Tensor
    """The position of each row's first key."""
    len_T: Tensor
    """Each row's number of keys; 0 for a row outside all groups."""
    narrow_T: IntArray
    """Each row's number of keys in narrow groups, on the host."""
    causal: bool
    """Whether a row sees only keys up to its own position."""


@dataclass(frozen=True, slots=True, eq=False)
class RowKeys:
    """The keys of each row of a pass, over all levels."""

    levels: tuple[LevelKeys, ...]
    """The keys by level."""
    num_T: IntArray
    """Number of keys that each row sees at most, on the host."""


def count_keys(levels: PreparedLevels) -> int:
    """Return the largest number of keys that a row of a pass sees."""
    if "most_keys" not in levels.memo:
        stored = _all_levels(levels)
        size = max((int(level.stop_G.max(initial=0)) for level in stored), default=0)
        num_T = np.zeros(size, dtype=np.int64)
        for level in stored:
            num_T += _by_row(level, level.kv_len_G, size)
        levels.memo["most_keys"] = int(num_T.max(initial=0))
    most: int = levels.memo["most_keys"]
    return most


def keys_by_row(levels: PreparedLevels, num_rows: int, page_size: int) -> RowKeys:
    """Return the keys of each row, which are found once for all layers of a pass.

    Args:
        levels: The levels of the pass.
        num_rows: Number of query rows.
        page_size: Tokens per page.
    """
    key = "rows", num_rows, page_size
    if key not in levels.memo:
        stored = _all_levels(levels)
        num_T = np.zeros(num_rows, dtype=np.int64)
        for level in stored:
            num_T += _by_row(level, level.kv_len_G, num_rows)
        by_level = tuple(_level_keys(each, num_rows, page_size, levels.device) for each in stored)
        levels.memo[key] = RowKeys(by_level, num_T)
    rows: RowKeys = levels.memo[key]
    return rows


def select_keys(
    q_THD: Tensor,
    weights_TH: Tensor,
    pool: Tensor,
    levels: PreparedLevels,
    positions_T: Tensor,
    num: int,
) -> Tensor:
    """Return the positions of the keys with the highest index scores.

    Args:
        q_THD: Index queries [T, H, D] in float32.
        weights_TH: Weight of each head [T, H] in float32.
        pool: Index keys [num_pages, page_size, D].
        levels: The levels of the pass.
        positions_T: Position of each query row [T].
        num: S, the number of keys to select.

    Returns:
        int32 positions [T, S], from the highest score on; -1 where a row sees fewer keys. Without
        a row that sees more than S keys, every key is selected and all positions are -1.
    """
    num_rows, most = len(q_THD), count_keys(levels)
    selected_TS = q_THD.new_full((num_rows, num), -1, dtype=torch.int32)
    if most <= num:
        return selected_TS
    rows = keys_by_row(levels, num_rows, pool.shape[1])
    step = max(PIECE // (most + 1), 1)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        scores_NL = _score_rows(q_THD, weights_TH, pool, rows, positions_T, (start, stop, most))
        if scores_NL.device.type == "cuda":
            values_NS, positions_NS = scores_NL.topk(num)
        else:
            order = scores_NL.sort(dim=-1, descending=True, stable=True)
            values_NS, positions_NS = order.values[:, :num], order.indices[:, :num]
        selected_TS[start:stop] = positions_NS.masked_fill(values_NS == -torch.inf, -1)
    return selected_TS


def read_slots(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a pool stores in some cache slots.

    Args:
        pool: Stored numbers [num_pages, page_size, ...].
        slots: Cache slots of any shape, page * page_size + offset.
        dtype: The type of the result.
    """
    # Some versions of torch cannot index 8-bit floats.
    bits = pool.view(torch.uint8) if pool.itemsize == 1 else pool
    stored = bits.view(-1, *pool.shape[2:])[slots]
    return stored.view(pool.dtype).to(dtype)


def find_slots(level: LevelKeys, rows: Tensor | slice, offsets: Tensor, page_size: int) -> Tensor:
    """Return the cache slots of keys; those of the group's first or last key for other offsets.

    Args:
        level: The level.
        rows: The rows, N of them.
        offsets: Places of keys among those of the row's group [N, L] or [1, L].
        page_size: Tokens per page.
    """
    last_N1 = (level.len_T[rows][:, None] - 1).clamp(min=0)
    offsets = torch.minimum(offsets.clamp(min=0), last_N1)
    page = level.pages_GP[level.group_T[rows][:, None], offsets // page_size]
    return page * page_size + offsets % page_size


def _all_levels(levels: PreparedLevels) -> list[HostLevel]:
    copied = levels.copies.levels if levels.copies is not None else ()
    return [level for level in (*levels.levels, *copied) if level.start_G.size]


def _by_row(level: HostLevel, values_G: IntArray, num_rows: int) -> IntArray:
    """Return the value of each row's group; 0 for rows outside all groups."""
    values_T = np.zeros(num_rows, dtype=np.int64)
    lengths_G = level.stop_G - level.start_G
    rows = np.repeat(level.start_G - lengths_G.cumsum() + lengths_G, lengths_G)
    values_T[rows + np.arange(len(rows))] = np.repeat(values_G, lengths_G)
    return values_T


def _level_keys(level: HostLevel, num_rows: int, page_size: int, device: torch.device) -> LevelKeys:
    stored_GP = level.pages_GP if level.stored_GP is None else level.stored_GP
    wide_G = level.stop_G - level.start_G >= WIDE
    groups = []
    for group in np.flatnonzero(wide_G & (level.kv_len_G > 0)).tolist():
        num = int(level.kv_len_G[group])
        pages = stored_GP[group, : -(-num // page_size), None]
        slots = (pages * page_size + np.arange(page_size)).ravel()[:num]
        rows = int(level.start_G[group]), int(level.stop_G[group])
        first = int(level.kv_start_G[group])
        groups.append(Group(*rows, to_device(slots, device), first, level.causal))
    group_T = _by_row(level, np.arange(len(wide_G)), num_rows)
    return LevelKeys(
        tuple(groups),
        to_device(np.ascontiguousarray(stored_GP), device),
        to_device(group_T, device),
        to_device(_by_row(level, level.kv_start_G, num_rows), device),
        to_device(_by_row(level, level.kv_len_G, num_rows), device),
        _by_row(level, np.where(wide_G, 0, level.kv_len_G), num_rows),
        level.causal,
    )


def _score_rows(
    q_THD: Tensor,
    weights_TH: Tensor,
    pool: Tensor,
    rows: RowKeys,
    positions_T: Tensor,
    part: tuple[int, int, int],
) -> Tensor:
    """Return the scores of all keys, by position, for the rows from `start` to `stop`.

    The last number of `part` is the number of positions. Where a row sees no key, the score is
    -inf.
    """
    start, stop, most = part
    # Scores of keys that a row does not see go into one more column.
    scores_NL = q_THD.new_full((stop - start, most + 1), -torch.inf, dtype=torch.float32)
    for level in rows.levels:
        for group in level.groups:
            first, last = max(group.start, start), min(group.stop, stop)
            if first < last:
                _score_group(
                    scores_NL[first - start : last - start],
                    group,
                    slice(first, last),
                    (q_THD, weights_TH, pool, positions_T),
                )
        for chunk in _narrow_rows(level, start, stop, q_THD.shape[1] + q_THD.shape[2]):
            width = int(level.narrow_T[chunk].max())
            at = to_device(chunk, q_THD.device)
            offsets_1L = torch.arange(width, device=q_THD.device)[None]
            slots_NL = find_slots(level, at, offsets_1L, pool.shape[1])
            k_NLD = read_slots(pool, slots_NL, torch.float32)
            products_NHL = torch.bmm(q_THD[at], k_NLD.mT).relu_()
            values_NL = torch.bmm(weights_TH[at][:, None], products_NHL)[:, 0]
            columns_NL = level.first_T[at][:, None] + offsets_1L
            seen_NL = offsets_1L < level.len_T[at][:, None]
            if level.causal:
                seen_NL &= columns_NL <= positions_T[at][:, None]
            columns_NL = columns_NL.masked_fill(~seen_NL, most)
            scores_NL[(at - start)[:, None], columns_NL] = values_NL
    return scores_NL[:, :most]


def _score_group(
    scores_NL: Tensor, group: Group, rows: slice, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Write the scores of a group's keys for some of its rows."""
    q_THD, weights_TH, pool, positions_T = tensors
    q_ND, num_heads = q_THD[rows].flatten(0, 1), q_THD.shape[1]
    size = max(PIECE // len(q_ND), 1)
    first = group.first
    for slots_L in group.slots_L.split(size):
        k_LD = read_slots(pool, slots_L, torch.float32)
        products_NHL = (q_ND @ k_LD.T).relu_().unflatten(0, (-1, num_heads))
        values_NL = torch.bmm(weights_TH[rows][:, None], products_NHL)[:, 0]
        if group.causal:
            columns_L = torch.arange(first, first + len(slots_L), device=q_THD.device)
            values_NL.masked_fill_(columns_L > positions_T[rows][:, None], -torch.inf)
        scores_NL[:, first : first + len(slots_L)] = values_NL
        first += len(slots_L)


def _narrow_rows(level: LevelKeys, start: int, stop: int, size: int) -> Iterator[IntArray]:
    """Yield rows with keys in narrow groups, in chunks; each key takes `size` numbers."""
    rows = start + np.flatnonzero(level.narrow_T[start:stop])
    if len(rows):
        step = max(PIECE // (int(level.narrow_T[rows].max()) * size), 1)
        for first in range(0, len(rows), step):
            yield rows[first : first + step]
