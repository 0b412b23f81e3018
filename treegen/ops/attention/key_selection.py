"""Select the keys that a row attends to, in layers with sparse attention.

An indexer gives each token a short key, and each row short queries with a weight for each head. The
score of a key for a row is the weighted sum, over the heads, of the positive parts of their
products. A row attends to the keys with the highest scores. Among equal scores, earlier keys are
selected first on a CPU. On a GPU, `torch.topk` selects any of them.

Some indexers select blocks of consecutive keys. The score of a block is that of its own index key,
which is stored with the last token of the block, or the highest score of its keys.

The index keys of a group with many rows are scored by one matrix product. Groups with few rows are
scored together. Each row then has the scores of all of its keys, in order of their positions, so
its selection is exact whatever the levels are.

Legend: T query rows, H heads of the indexer, D numbers of an index key, X numbers that a token
stores, G groups, P pages of a group, N some rows, C selections of a row (1, or one for each head),
L keys, B keys of a block, S selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treegen.common.device import to_device
from treegen.ops.attention.level import HostLevel, IntArray, memoize
from treegen.ops.attention.types import PreparedLevels

MAX_ELEMENTS: Final = 2**25
"""Maximum elements of a temporary tensor."""
MIN_WIDE_ROWS: Final = 8
"""Minimum rows of a group whose keys are scored by a separate matrix product."""


class IndexForm(NamedTuple):
    """The selection rule of an indexer."""

    num: int
    """Maximum blocks of keys that a row selects by their scores."""
    size: int = 1
    """Keys of a block; 1 where single keys are selected."""
    is_pooled: bool = False
    """Whether a block has an index key of its own, made of those of its tokens. A row then selects
    among complete blocks, and also selects all keys after its last complete block."""
    local: int = 0
    """Number of blocks, its own and those before it, that a row selects whatever their scores."""
    selections: int = 1
    """C, the number of selections of a row. Each is for consecutive heads of attention."""

    @property
    def width(self) -> int:
        """Maximum keys that a row selects."""
        return self.num * self.size + (self.size - 1 if self.is_pooled else 0)

    def fits(self, num_heads: int, num_key_heads: int) -> bool:
        """Return whether the heads of each selection share key heads with no other selection."""
        num = self.selections
        return not num_heads % num and (not num_key_heads % num or not num % num_key_heads)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A group of a level with at least `MIN_WIDE_ROWS` rows."""

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

    def count() -> int:
        stored = _all_levels(levels)
        size = max((int(level.stop_G.max(initial=0)) for level in stored), default=0)
        return int(_count_by_row(stored, size).max(initial=0))

    return memoize(levels.memo, "max_keys", count)


def _count_by_row(stored: Sequence[HostLevel], num_rows: int) -> IntArray:
    """Return the number of keys of each row in all levels."""
    num_T = np.zeros(num_rows, dtype=np.int64)
    for level in stored:
        num_T += _by_row(level, level.kv_len_G, num_rows)
    return num_T


def keys_by_row(levels: PreparedLevels, num_rows: int, page_size: int) -> RowKeys:
    """Return the keys of each row, which are found once for all layers of a pass.

    Args:
        levels: The levels of the pass.
        num_rows: Number of query rows.
        page_size: Tokens per page.
    """

    def find() -> RowKeys:
        stored = _all_levels(levels)
        by_level = (_level_keys(level, num_rows, page_size, levels.device) for level in stored)
        return RowKeys(tuple(by_level), _count_by_row(stored, num_rows))

    return memoize(levels.memo, ("rows", num_rows, page_size), find)


def select_keys(
    q_THD: Tensor,
    weights_TH: Tensor | None,
    pool: Tensor,
    levels: PreparedLevels,
    positions_T: Tensor,
    form: IndexForm,
) -> Tensor:
    """Return the positions of the keys with the highest index scores.

    Args:
        q_THD: Index queries [T, H, D] in float32.
        weights_TH: Weight of each head [T, H] in float32. With None, the scores are the products
            themselves, and each head selects keys of its own.
        pool: Index keys [num_pages, page_size, D].
        levels: The levels of the pass.
        positions_T: Position of each query row [T].
        form: Which keys are selected.

    Returns:
        int32 positions [T, S], or [T, H, S] without weights, from the highest score on; -1 where a
            row sees fewer keys. Without a row that sees more keys than it selects, nothing is
            scored, and all positions are -1.
    """
    num_rows, max_keys = len(q_THD), count_keys(levels)
    heads = q_THD.shape[1:2] if weights_TH is None else ()
    selected_TCS = q_THD.new_full((num_rows, *heads, form.width), -1, dtype=torch.int32)
    if max_keys <= form.width:
        return selected_TCS
    rows = keys_by_row(levels, num_rows, pool.shape[1])
    queries = _Queries(q_THD, weights_TH, positions_T, form.size if form.is_pooled else 1)
    num_columns = max_keys // queries.stride
    step = max(MAX_ELEMENTS // ((num_columns + 1) * max(heads, default=1)), 1)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        scores_NCL = _score_rows(queries, pool, rows, (start, stop, num_columns))
        chosen_NCS = _choose_keys(scores_NCL, positions_T[start:stop], form)
        selected_TCS[start:stop] = chosen_NCS if heads else chosen_NCS[:, 0]
    return selected_TCS


def _choose_keys(scores_NCL: Tensor, positions_N: Tensor, form: IndexForm) -> Tensor:
    """Return the positions [N, C, S] of the keys in the blocks with the highest scores, or -1."""
    num, size, is_pooled, num_local, _ = form
    offsets_B = torch.arange(size, device=scores_NCL.device, dtype=torch.int32)
    if size > 1 and not is_pooled:
        padded = pad(scores_NCL, (0, -scores_NCL.shape[-1] % size), value=-torch.inf)
        scores_NCL = padded.unflatten(-1, (-1, size)).amax(-1)
    if num_local:
        before = torch.arange(num_local, device=scores_NCL.device)
        own_N1 = (positions_N // size)[:, None]
        local_N1L = (own_N1 - before).clamp_(0, scores_NCL.shape[-1] - 1)[:, None]
        scores_NCL.scatter_(-1, local_N1L.expand(-1, scores_NCL.shape[1], -1), torch.inf)
    if scores_NCL.device.type == "cuda":
        values_NCS, blocks_NCS = scores_NCL.topk(num)
    else:
        order = scores_NCL.sort(dim=-1, descending=True, stable=True)
        values_NCS, blocks_NCS = order.values[..., :num], order.indices[..., :num]
    chosen_NCS = blocks_NCS.int().masked_fill_(values_NCS == -torch.inf, -1)
    if size == 1:
        return chosen_NCS
    last_N11 = positions_N[:, None, None].int()
    keys_NCS = (chosen_NCS[..., None] * size + offsets_B).flatten(-2)
    keys_NCS.masked_fill_((keys_NCS < 0) | (keys_NCS > last_N11), -1)
    if not is_pooled:
        return keys_NCS
    tail_N1S = (last_N11 + 1) // size * size + offsets_B[:-1]
    tail_N1S = tail_N1S.masked_fill(tail_N1S > last_N11, -1)
    return torch.cat([keys_NCS, tail_N1S], -1)


def read_blocks(
    pool: Tensor,
    levels: PreparedLevels,
    positions_T: Tensor,
    slots_T: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the stored numbers of the block that each row's token completes.

    Args:
        pool: Stored numbers [num_pages, page_size, X].
        levels: The levels of the pass.
        positions_T: Position of each query row [T].
        slots_T: The cache slot of each row's own token [T].
        size: Tokens of a block.
        dtype: The type of the result.

    Returns:
        Stored numbers [T, B, X]; those of the row's own token where a row completes no block.
    """
    if size == 1:
        return read_slots(pool, slots_T[:, None], dtype)
    page_size = pool.shape[1]
    slots_TB = memoize(
        levels.memo,
        ("blocks", len(slots_T), page_size, size),
        lambda: _block_slots(levels, positions_T, slots_T, page_size, size),
    )
    return read_slots(pool, slots_TB, dtype)


def _block_slots(
    levels: PreparedLevels, positions_T: Tensor, slots_T: Tensor, page_size: int, size: int
) -> Tensor:
    """Return the cache slots [T, B] that `read_blocks` reads."""
    before_1B = torch.arange(1 - size, 1, device=positions_T.device)[None]
    at_TB = positions_T[:, None] + before_1B
    is_last_T1 = completes_block(positions_T, size)[:, None]
    slots_TB = slots_T[:, None].expand(-1, size)
    for level in keys_by_row(levels, len(slots_T), page_size).levels:
        offsets_TB = at_TB - level.first_T[:, None]
        inside_TB = is_last_T1 & (offsets_TB >= 0) & (offsets_TB < level.len_T[:, None])
        level_slots_TB = find_slots(level, slice(None), offsets_TB, page_size)
        slots_TB = torch.where(inside_TB, level_slots_TB, slots_TB)
    return slots_TB


def completes_block(positions_T: Tensor, size: int) -> Tensor:
    """Return which positions are the last of a block of `size` positions."""
    return (positions_T + 1) % size == 0


def read_slots(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the stored numbers of some cache slots.

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
        offsets: Indices of keys among those of the row's group [N, L] or [1, L].
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
    wide_G = level.stop_G - level.start_G >= MIN_WIDE_ROWS
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


class _Queries(NamedTuple):
    """The queries of an indexer for all rows of a pass."""

    q_THD: Tensor
    """The queries of each head."""
    weights_TH: Tensor | None
    """The weight of each head; None if each head has scores of its own."""
    positions_T: Tensor
    """The position of each row."""
    stride: int
    """Only every so many tokens, the last of each block, have a key that is scored."""

    def score(self, rows: slice | Tensor, k_LD: Tensor) -> Tensor:
        """Return the scores [N, C, L] of keys [L, D], or of keys of each row [N, L, D]."""
        products_NHL = torch.matmul(self.q_THD[rows], k_LD.mT)
        if self.weights_TH is None:
            return products_NHL
        return torch.bmm(self.weights_TH[rows][:, None], products_NHL.relu_())


def _score_rows(
    queries: _Queries, pool: Tensor, rows: RowKeys, part: tuple[int, int, int]
) -> Tensor:
    """Return the scores [N, C, L] of keys in the order of their positions, for some rows.

    The rows and the number of keys or blocks are those of `part`: first row, end, L. The score of a
    key that a row does not see is -inf.
    """
    start, stop, num_columns = part
    stride, (_, num_heads, dim) = queries.stride, queries.q_THD.shape
    num_selections = num_heads if queries.weights_TH is None else 1
    # Scores of keys that a row does not see go into one more column.
    shape = stop - start, num_selections, num_columns + 1
    selections_C1 = torch.arange(num_selections, device=pool.device)[:, None]
    scores_NCL = queries.q_THD.new_full(shape, -torch.inf, dtype=torch.float32)
    for level in rows.levels:
        for group in level.groups:
            first, last = max(group.start, start), min(group.stop, stop)
            if first < last:
                scores = scores_NCL[first - start : last - start]
                _score_group(scores, group, slice(first, last), queries, pool)
        for chunk in _narrow_rows(level, start, stop, num_heads + dim):
            at = to_device(chunk, pool.device)
            first_N1 = level.first_T[at][:, None]
            width = int(level.narrow_T[chunk].max())
            offsets_1L = torch.arange(0, width, stride, device=pool.device)[None]
            offsets_NL = (-1 - first_N1) % stride + offsets_1L
            slots_NL = find_slots(level, at, offsets_NL, pool.shape[1])
            values_NCL = queries.score(at, read_slots(pool, slots_NL, torch.float32))
            seen_NL = offsets_NL < level.len_T[at][:, None]
            if level.causal:
                seen_NL &= first_N1 + offsets_NL <= queries.positions_T[at][:, None]
            columns_NL = ((first_N1 + offsets_NL) // stride).masked_fill(~seen_NL, num_columns)
            rows_N11 = (at - start)[:, None, None]
            scores_NCL[rows_N11, selections_C1, columns_NL[:, None]] = values_NCL
    return scores_NCL[..., :num_columns]


def _score_group(
    scores_NCL: Tensor, group: Group, rows: slice, queries: _Queries, pool: Tensor
) -> None:
    """Write the scores of a group's keys for some of its rows."""
    stride = queries.stride
    size = max(MAX_ELEMENTS // ((rows.stop - rows.start) * queries.q_THD.shape[1]), 1)
    skipped = (-1 - group.first) % stride
    column = (group.first + skipped) // stride
    for slots_L in group.slots_L[skipped::stride].split(size):
        values_NCL = queries.score(rows, read_slots(pool, slots_L, torch.float32))
        stop = column + len(slots_L)
        if group.causal:
            last_L = torch.arange(column + 1, stop + 1, device=pool.device) * stride - 1
            is_later_NL = last_L > queries.positions_T[rows][:, None]
            values_NCL.masked_fill_(is_later_NL[:, None], -torch.inf)
        scores_NCL[..., column:stop] = values_NCL
        column = stop


def _narrow_rows(level: LevelKeys, start: int, stop: int, size: int) -> Iterator[IntArray]:
    """Yield rows with keys in narrow groups, in chunks; each key takes `size` numbers."""
    rows = start + np.flatnonzero(level.narrow_T[start:stop])
    if len(rows):
        step = max(MAX_ELEMENTS // (int(level.narrow_T[rows].max()) * size), 1)
        for first in range(0, len(rows), step):
            yield rows[first : first + step]
