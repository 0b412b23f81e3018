"""Attention to selected keys, in layers with sparse attention.

The rows of a wide group together select most of its keys, if these are few. Such a group is read as
a whole, once for all of its rows, and keys that a row did not select are masked. Of other groups, a
row's selected keys are gathered. All parts are merged exactly.

Legend: T query rows, H query heads, G key heads, K key dimension, V value dimension, N some rows, L
keys of a group, S selected keys of a row, C selections of a row, R rank of latents, D = R and the
rotated numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.spec import LatentSpec
from treegen.ops.attention.key_selection import (
    MAX_ELEMENTS,
    Group,
    LevelKeys,
    RowKeys,
    find_slots,
    keys_by_row,
    read_slots,
)
from treegen.ops.attention.latent import expand_stored, rows_to_expand
from treegen.ops.attention.level import IntArray, memoize
from treegen.ops.attention.merge import add_sinks, merge
from treegen.ops.attention.types import PreparedLevels

MAX_MASKED: Final = 4
"""A group is read as a whole only if its rows see at most this many times the keys they select."""

_Part = tuple[Tensor, Tensor]
"""Results [N, H, V] and LSE [N, H]."""
_AttendPart = Callable[[slice, Tensor, Tensor], _Part]
"""Attends some rows to keys, whose slots it gets with a mask."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedKeys:
    """The selected keys of each row of a pass, and where they are stored."""

    positions_TS: Tensor
    """int32, the positions of the selected keys, or -1; [T, C, S] if heads have selections of their
    own, each of C groups of consecutive heads one."""
    own_slot_T: Tensor
    """The cache slot of each row's own key, which is read in place of missing keys."""
    levels: PreparedLevels
    """The levels of the pass."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    """The plan by which the groups of a pass are read."""

    masked: tuple[Group, ...]
    """The groups that are read as a whole."""
    gathered: tuple[tuple[LevelKeys, Tensor], ...]
    """The other levels, with the number of keys that are gathered for each row [T]."""
    max_gathered: int
    """Maximum keys that are gathered for a row."""


def attend_selected(
    q_THK: Tensor,
    keys: Tensor,
    values: Tensor,
    selected: SelectedKeys,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query row to its selected keys.

    Args:
        q_THK: Queries [T, H, K].
        keys: Keys [num_pages, page_size, G, K].
        values: Values [num_pages, page_size, G, V].
        selected: The selected keys.
        scale: Factor of the logits.
        sinks: One more logit in the denominator of each head [H]. Default: no sinks.

    Returns:
        Results [T, H, V] in the type of q.
    """
    if selected.positions_TS.dim() == 3:
        results = []
        for at, (heads, key_heads) in enumerate(_split_heads(q_THK, keys, selected)):
            one = replace(selected, positions_TS=selected.positions_TS[:, at])
            k, v = keys[:, :, key_heads], values[:, :, key_heads]
            head_sinks = None if sinks is None else sinks[heads]
            results.append(attend_selected(q_THK[:, heads], k, v, one, scale, head_sinks))
        return torch.cat(results, 1)

    def _attend_group(rows: slice, slots_L: Tensor, mask_NL: Tensor) -> _Part:
        k_LGK, v_LGV = (read_slots(pool, slots_L, q_THK.dtype) for pool in (keys, values))
        return _attend_masked(q_THK[rows], k_LGK, v_LGV, mask_NL, scale)

    def _attend_rows(rows: slice, slots_NS: Tensor, mask_NS: Tensor) -> _Part:
        k_NSGK, v_NSGV = (read_slots(pool, slots_NS, q_THK.dtype) for pool in (keys, values))
        return _attend_gathered(q_THK[rows], k_NSGK, v_NSGV, mask_NS, scale)

    return _merge_reads(q_THK, values.shape[-1], keys, selected, sinks, _attend_group, _attend_rows)


def attend_selected_latents(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    selected: SelectedKeys,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query row to its selected keys, which are stored as latents.

    Args:
        q_THK: Queries [T, H, K]; the last numbers of each head are rotated.
        pool: Latents, each followed by its rotated numbers [num_pages, page_size, 1, D].
        up_HXR: Weights that make keys and values from a latent [H, X, R].
        form: Sizes of the latents and heads.
        selected: The selected keys.
        scale: Factor of the logits.
        sinks: One more logit in the denominator of each head [H]. Default: no sinks.

    Returns:
        Results [T, H, V] in the type of q.
    """
    up_HNR, up_HVR = up_HXR.split([form.nope, form.v_dim], 1)
    q_THN, q_THP = q_THK.split([form.nope, form.rope], -1)
    q_THD = torch.cat([torch.bmm(q_THN.transpose(0, 1), up_HNR).transpose(0, 1), q_THP], -1)

    def expand_results(out_NHR: Tensor, lse_NH: Tensor) -> _Part:
        out_HNV = torch.bmm(out_NHR.to(q_THK.dtype).transpose(0, 1), up_HVR.mT)
        return _to_wide(out_HNV.transpose(0, 1)), lse_NH

    def _attend_group(rows: slice, slots_L: Tensor, mask_NL: Tensor) -> _Part:
        stored_LD = read_slots(pool, slots_L, q_THK.dtype)[:, 0]
        if len(mask_NL) >= rows_to_expand(form):
            k_LHK, v_LHV = expand_stored(stored_LD, up_HXR, form)
            return _attend_masked(q_THK[rows], k_LHK, v_LHV, mask_NL, scale)
        k_L1D, v_L1R = stored_LD[:, None], stored_LD[:, None, : form.rank]
        return expand_results(*_attend_masked(q_THD[rows], k_L1D, v_L1R, mask_NL, scale))

    def _attend_rows(rows: slice, slots_NS: Tensor, mask_NS: Tensor) -> _Part:
        k_NS1D = read_slots(pool, slots_NS, q_THK.dtype)
        v_NS1R = k_NS1D[..., : form.rank]
        return expand_results(*_attend_gathered(q_THD[rows], k_NS1D, v_NS1R, mask_NS, scale))

    return _merge_reads(q_THK, form.v_dim, pool, selected, sinks, _attend_group, _attend_rows)


def _merge_reads(
    q_THK: Tensor,
    v_dim: int,
    pool: Tensor,
    selected: SelectedKeys,
    sinks: Tensor | None,
    attend_masked: _AttendPart,
    attend_gathered: _AttendPart,
) -> Tensor:
    """Return the merged results of all reads [T, H, V] in the type of q.

    Args:
        q_THK: Queries [T, H, K].
        v_dim: V.
        pool: Keys [num_pages, page_size, ...].
        selected: The selected keys.
        sinks: One more logit in the denominator of each head [H]; None for no sinks.
        attend_masked: Attends rows to the same keys, whose slots [L] it gets with a mask [N, L].
        attend_gathered: Attends each row to its own keys, whose slots [N, S] it gets with a mask
            [N, S].
    """
    reads = _plan_reads(selected, pool.shape[1])
    wide = torch.promote_types(q_THK.dtype, torch.float32)
    out_THV = q_THK.new_zeros(*q_THK.shape[:2], v_dim, dtype=wide)
    lse_TH = out_THV.new_full(q_THK.shape[:2], -torch.inf)

    def add(rows: slice, part: _Part) -> None:
        outs, lses = (out_THV[rows], part[0]), (lse_TH[rows], part[1])
        out_THV[rows], lse_TH[rows] = merge(outs, lses)

    for group in reads.masked:
        rows = slice(group.start, group.stop)
        for slots_L, mask_NL in _pieces(group, selected, q_THK.shape[1]):
            add(rows, attend_masked(rows, slots_L, mask_NL))
    for rows, slots_NS, mask_NS in _gathers(reads, selected, pool):
        add(rows, attend_gathered(rows, slots_NS, mask_NS))
    if sinks is not None:
        out_THV, lse_TH = add_sinks(out_THV, lse_TH, sinks)
    return out_THV.to(q_THK.dtype)


def _split_heads(
    q_THK: Tensor, keys: Tensor, selected: SelectedKeys
) -> Iterator[tuple[slice, slice]]:
    """Yield the query heads and the key heads that each selection is for."""
    num, num_heads, num_key_heads = selected.positions_TS.shape[1], q_THK.shape[1], keys.shape[2]
    for at in range(num):
        first, stop = at * num_key_heads // num, -(-(at + 1) * num_key_heads // num)
        heads = slice(at * num_heads // num, (at + 1) * num_heads // num)
        yield heads, slice(first, stop)


def _plan_reads(selected: SelectedKeys, page_size: int) -> _Reads:
    """Decide which groups are read as a whole, once for all layers of a pass."""
    (num_rows, num), levels = selected.positions_TS.shape, selected.levels
    return memoize(
        levels.memo,
        ("reads", num, num_rows, page_size),
        lambda: _make_reads(keys_by_row(levels, num_rows, page_size), num, levels.device),
    )


def _make_reads(rows: RowKeys, num: int, device: torch.device) -> _Reads:
    masked: list[Group] = []
    gathered: list[tuple[LevelKeys, Tensor]] = []
    total_T = np.zeros(len(rows.num_T), dtype=np.int64)
    for level in rows.levels:
        len_T: IntArray = level.narrow_T.copy()
        for group in level.groups:
            if _reads_whole(rows.num_T[group.start : group.stop], num):
                masked.append(group)
            else:
                len_T[group.start : group.stop] = len(group.slots_L)
        if len_T.any():
            gathered.append((level, to_device(len_T, device)))
            total_T += len_T
    return _Reads(tuple(masked), tuple(gathered), min(int(total_T.max(initial=0)), num))


def _reads_whole(num_N: IntArray, num: int) -> bool:
    """Return whether rows together select most keys of their group, if rows select by chance.

    Args:
        num_N: Number of keys that each row sees.
        num: Number of keys that each row selects.
    """
    if num_N.max() > MAX_MASKED * num:
        return False
    missed = np.log1p(-np.minimum(num / num_N, 1 - 1e-9)).sum()
    return bool(missed <= np.log(0.5))


def _pieces(group: Group, selected: SelectedKeys, num_heads: int) -> list[tuple[Tensor, Tensor]]:
    """Return the slots of a group's keys in pieces, and which rows have selected them."""
    num_rows, num_keys = group.stop - group.start, len(group.slots_L)
    offsets_NS = selected.positions_TS[group.start : group.stop].long() - group.first
    inside_NS = (offsets_NS >= 0) & (offsets_NS < num_keys)
    mask_NL = offsets_NS.new_zeros((num_rows, num_keys + 1), dtype=torch.bool)
    mask_NL.scatter_(1, offsets_NS.masked_fill(~inside_NS, num_keys), True)
    size = max(MAX_ELEMENTS // (num_rows * num_heads), 1)
    masks = mask_NL[:, :num_keys].split(size, 1)
    return list(zip(group.slots_L.split(size), masks, strict=True))


def _gathers(
    reads: _Reads, selected: SelectedKeys, pool: Tensor
) -> list[tuple[slice, Tensor, Tensor]]:
    """Return rows, the slots of their gathered keys [N, S] and a mask of those that exist."""
    num_rows, page_size = len(selected.own_slot_T), pool.shape[1]
    if not reads.max_gathered:
        return []
    size = max(MAX_ELEMENTS // (reads.max_gathered * pool[0, 0].numel()), 1)
    gathers = []
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        positions_NS = selected.positions_TS[rows].long()
        slots_NS = torch.full_like(positions_NS, -1)
        for level, len_T in reads.gathered:
            offsets_NS = positions_NS - level.first_T[rows][:, None]
            inside_NS = (offsets_NS >= 0) & (offsets_NS < len_T[rows][:, None])
            level_slots_NS = find_slots(level, rows, offsets_NS, page_size)
            slots_NS = torch.where(inside_NS, level_slots_NS, slots_NS)
        if reads.max_gathered < slots_NS.shape[1]:
            order_NS = (slots_NS < 0).to(torch.uint8).argsort(dim=1, stable=True)
            slots_NS = slots_NS.gather(1, order_NS[:, : reads.max_gathered])
        mask_NS = slots_NS >= 0
        gathers.append(
            (rows, torch.where(mask_NS, slots_NS, selected.own_slot_T[rows, None]), mask_NS)
        )
    return gathers


def _attend_masked(
    q_NHK: Tensor, k_LGK: Tensor, v_LGV: Tensor, mask_NL: Tensor, scale: float
) -> _Part:
    """Attend rows to the same keys, each row to those that its mask allows."""
    q_GNRK = q_NHK.unflatten(1, (k_LGK.shape[1], -1)).permute(1, 0, 2, 3)
    logits_GML = torch.bmm(q_GNRK.flatten(1, 2), k_LGK.permute(1, 2, 0))
    logits_GNRL = _to_wide(logits_GML).unflatten(1, q_GNRK.shape[1:3]) * scale
    logits_GNRL = logits_GNRL.masked_fill_(~mask_NL[None, :, None], -torch.inf)
    weights_GNRL, lse_GNR = _softmax(logits_GNRL)
    out_GMV = torch.bmm(weights_GNRL.flatten(1, 2).to(v_LGV.dtype), v_LGV.transpose(0, 1))
    out_GNRV = _to_wide(out_GMV).unflatten(1, q_GNRK.shape[1:3])
    return out_GNRV.transpose(0, 1).flatten(1, 2), lse_GNR.transpose(0, 1).flatten(1, 2)


def _attend_gathered(
    q_NHK: Tensor, k_NSGK: Tensor, v_NSGV: Tensor, mask_NS: Tensor, scale: float
) -> _Part:
    """Attend each row to its own keys, as far as its mask allows."""
    q_NGRK = q_NHK.unflatten(1, (k_NSGK.shape[2], -1))
    logits_NGRS = _to_wide(q_NGRK @ k_NSGK.permute(0, 2, 3, 1)) * scale
    logits_NGRS = logits_NGRS.masked_fill_(~mask_NS[:, None, None], -torch.inf)
    weights_NGRS, lse_NGR = _softmax(logits_NGRS)
    out_NGRV = weights_NGRS.to(v_NSGV.dtype) @ v_NSGV.transpose(1, 2)
    return _to_wide(out_NGRV).flatten(1, 2), lse_NGR.flatten(1, 2)


def _to_wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _softmax(logits: Tensor) -> _Part:
    """Return the softmax over the last dimension and its LSE; zeros without any key."""
    lse = logits.logsumexp(-1)
    shift = lse.clamp(min=torch.finfo(lse.dtype).min)
    return (logits - shift[..., None]).exp_(), lse
