"""Attention over levels of latents (multi-head latent attention).

There are two forms, and they give the same numbers. Absorbed: queries are multiplied by what would
make keys of latents, and results by what makes values of them. Then a latent is one key for all
heads, and its first numbers are the value. A row's heads are the rows of one product, which reads
little and computes much. Expanded: keys and values of all heads are made of the latents first. That
costs less where many rows read the same keys.

Keys and values of a level may lie expanded beside the latents, in copies. They take whole blocks of
pages of the same pool. In a pass of many rows, as of a long prompt, they are made meanwhile, piece
by piece. All parts are merged in the space of the values.

Legend: T query rows, H heads, N numbers of a head's key that are made of a latent, V numbers of a
head's value, R rank, P rotated numbers, K = N + P, X = N + V, L keys of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Unpack

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.spec import LatentSpec
from treegen.ops.attention.api import AttendOptions, attend, prepare_host
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.merge import merge
from treegen.ops.attention.types import PreparedLevels

_PIECE: Final = 2**26  # numbers of the keys and values of a piece at most


def attend_latents(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    levels: PreparedLevels,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Attend each query row to the latents of its groups, over all levels, in one softmax.

    Returns out [T, H, V] in the type of q.

    Args:
        q_THK: Queries; the last P numbers are rotated.
        pool: Latents and the rotated numbers behind them, [num_pages, page_size, 1, R + P].
        up_HXR: What makes keys and values of a latent.
        levels: As in `treegen.ops.attention.attend`; of options the scale must be given.
        options: As in `treegen.ops.attention.attend`; of options the scale must be given.

    Raises:
        InputError: the implementation does not take heads of this width.
    """
    sinks = options.pop("sinks", None)
    split = _split(levels, form, pool)
    wide = torch.promote_types(q_THK.dtype, torch.float32)
    if split.is_all and sinks is None:
        out_THV = q_THK.new_zeros(*q_THK.shape[:2], form.v_dim, dtype=wide)
        lse_TH = out_THV.new_full(q_THK.shape[:2], -torch.inf)
    else:
        out_THV, lse_TH = _attend_absorbed(q_THK, pool, up_HXR, form, split.stored, options, sinks)
    if levels.copies is None and not split.pieces:
        return out_THV
    if levels.copies is not None:
        keys, values = view_expanded(pool, form, q_THK.dtype)
        part = attend(q_THK, keys, values, levels.copies, return_lse=True, **options)
        if not split.pieces and (in_one := _merge_kernel(q_THK)) is not None:
            return in_one(out_THV, lse_TH, *part)
        out_THV, lse_TH = merge((out_THV.to(wide), part[0].to(wide)), (lse_TH, part[1]))
    out_THV = out_THV.to(wide)
    for piece in split.pieces:
        made = _expand_latents(pool, piece.slots_L, up_HXR, form, q_THK.dtype)
        keys, values = (each.unflatten(0, (-1, pool.shape[1])) for each in made)
        rows = piece.rows
        part = attend(q_THK[rows], keys, values, piece.level, return_lse=True, **options)
        both = (out_THV[rows], part[0].to(wide)), (lse_TH[rows], part[1])
        out_THV[rows], lse_TH[rows] = merge(*both)
    return out_THV.to(q_THK.dtype)


def _merge_kernel(q_THK: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """What merges two results in one launch, where there is one."""
    if q_THK.device.type != "cuda" or q_THK.dtype == torch.float64:
        return None
    try:
        from treegen.ops.attention.gpu.merge_two import merge_pair
    except ImportError:  # Triton is not installed
        return None
    return merge_pair


def _attend_absorbed(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    levels: PreparedLevels,
    options: AttendOptions,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Out [T, H, V] in the type of q, and LSE [T, H], of levels that are read as latents."""
    up_HNR, up_HVR = up_HXR.split([form.nope, form.v_dim], 1)
    q_HTN, q_HTP = q_THK.transpose(0, 1).split([form.nope, form.rope], -1)
    q_HTD = q_THK.new_empty(form.heads, len(q_THK), form.kept)
    torch.bmm(q_HTN, up_HNR, out=q_HTD[..., : form.rank])
    q_HTD[..., form.rank :] = q_HTP
    options = {**options, "sinks": sinks}
    out_THR, lse_TH = attend(
        q_HTD.transpose(0, 1), pool, pool[..., : form.rank], levels, return_lse=True, **options
    )
    return torch.bmm(out_THR.transpose(0, 1), up_HVR.mT).transpose(0, 1), lse_TH


def view_expanded(pool: Tensor, form: LatentSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copies of keys [B, page_size, H, K] and values [B, page_size, H, V], as parts of a pool.

    Block b is what `form.copy_pages` pages hold from page b * copy_pages on.
    """
    num_pages, page_size = pool.shape[:2]
    pages = form.copy_pages(pool.itemsize, dtype.itemsize)
    blocks = pool[: num_pages // pages * pages].view(-1, page_size, pages * form.kept).view(dtype)
    k_size = form.heads * form.k_dim
    keys, values = blocks[..., : form.expanded].tensor_split([k_size], -1)
    return keys.unflatten(-1, (form.heads, -1)), values.unflatten(-1, (form.heads, -1))


def write_expanded(
    pool: Tensor,
    slots_L: Tensor,
    targets_L: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    dtype: torch.dtype,
) -> None:
    """Make the keys and values of some latents, and write them into copies.

    Args:
        slots_L: Where the latents are, page * page_size + offset.
        targets_L: Where in copies the keys and values go, block * page_size + offset.
    """
    num = get_chunk_size(form)
    for slots, targets in zip(slots_L.split(num), targets_L.split(num), strict=True):
        made = _expand_latents(pool, slots, up_HXR, form, dtype)
        for copies, new in zip(view_expanded(pool, form, dtype), made, strict=True):
            copies.flatten(0, 1)[targets] = new


def get_chunk_size(form: LatentSpec) -> int:
    """Tokens whose keys and values are made at once."""
    return max(_PIECE // form.expanded, 1)


def _expand_latents(
    pool: Tensor, slots_L: Tensor, up_HXR: Tensor, form: LatentSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys [L, H, K] and values [L, H, V] that are made of the latents in some slots."""
    # Not all versions of torch take numbers of 8 bits by index.
    bits = pool.view(torch.uint8) if pool.itemsize == 1 else pool
    kept_LD = bits.view(-1, form.kept)[slots_L].view(pool.dtype).to(dtype)
    latent_LR, rotated_LP = kept_LD.split([form.rank, form.rope], -1)
    made_LHX = (latent_LR @ up_HXR.flatten(0, 1).T).unflatten(-1, (form.heads, -1))
    nope_LHN, v_LHV = made_LHX.split([form.nope, form.v_dim], -1)
    k_LHK = torch.cat([nope_LHN, rotated_LP[:, None].expand(-1, form.heads, -1)], -1)
    return k_LHK, v_LHV


# Passes of many rows


@dataclass(frozen=True, slots=True)
class _ExpandedChunk:
    """Some keys of one group, of which keys and values are made.

    rows: those of the group. slots_L: where its latents are; the last ones fill a page.
    level: of these rows and keys.
    """

    rows: slice
    slots_L: Tensor
    level: PreparedLevels


@dataclass(frozen=True, slots=True)
class _LevelSplit:
    """The levels of a pass: those that are read as latents, and pieces of others.

    is_all: whether the pieces have all keys.
    """

    stored: PreparedLevels
    pieces: tuple[_ExpandedChunk, ...] = ()
    is_all: bool = False


def rows_to_expand(form: LatentSpec) -> float:
    """From how many rows on it costs less to make keys and values of latents on the way.

    To make them takes a product of its own. They are narrower than latents, for each row and head.
    """
    spared = form.kept + form.rank - form.k_dim - form.v_dim
    made = form.rank * (form.nope + form.v_dim)
    return made / spared if spared > 0 else float("inf")


def _split(levels: PreparedLevels, form: LatentSpec, pool: Tensor) -> _LevelSplit:
    """Split the levels of a pass, once for all layers of a form."""
    if not levels.expands:
        return _LevelSplit(levels)
    page_size = pool.shape[1]
    key = form, page_size
    if key not in levels.memo:
        levels.memo[key] = _make_split(levels, form, page_size)
    found: _LevelSplit = levels.memo[key]
    return found


def _make_split(levels: PreparedLevels, form: LatentSpec, page_size: int) -> _LevelSplit:
    stored, pieces = [], []
    for level in levels.levels:
        wide_G = level.stop_G - level.start_G >= rows_to_expand(form)
        pieces += [
            piece
            for group in np.flatnonzero(wide_G)
            for piece in _pieces(level, int(group), levels, form, page_size)
        ]
        # What is read elsewhere has no keys here.
        stored.append(replace(level, kv_len_G=np.where(wide_G, 0, level.kv_len_G), memo={}))
    if not pieces:
        return _LevelSplit(levels)
    rest = prepare_host(stored, levels.positions_T, levels.device, levels.implementation)
    is_all = not any(level.kv_len_G.any() for level in stored) and levels.copies is None
    return _LevelSplit(rest, tuple(pieces), is_all)


def _pieces(
    level: HostLevel, group: int, levels: PreparedLevels, form: LatentSpec, page_size: int
) -> Iterator[_ExpandedChunk]:
    start, stop = int(level.start_G[group]), int(level.stop_G[group])
    num_keys, origin = int(level.kv_len_G[group]), int(level.kv_start_G[group])
    rows = slice(start, stop)
    positions = levels.positions_T[rows] if levels.positions_T is not None else None
    size = max(get_chunk_size(form) // page_size, 1) * page_size
    for first in range(0, num_keys, size):
        pages = level.pages_GP[group, first // page_size : -(-(first + size) // page_size)]
        num = min(size, num_keys - first)
        pages = pages[: -(-num // page_size)]
        slots = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        one = np.ones(1, dtype=np.int64)
        host = HostLevel(
            start_G=0 * one,
            stop_G=(stop - start) * one,
            pages_GP=np.arange(len(pages))[None],
            kv_len_G=num * one,
            kv_start_G=(origin + first) * one,
            causal=level.causal,
        )
        prepared = prepare_host([host], positions, levels.device, levels.implementation)
        yield _ExpandedChunk(rows, to_device(slots, levels.device), prepared)
