"""Attention over levels of latents (multi-head latent attention, MLA).

Two equivalent forms exist. Absorbed: queries are multiplied by the weights that make keys from
latents, and results by the weights that make values. A latent is then one key for all heads, its
first numbers are the value, and a row's heads are the rows of one product: little to read, much to
compute. Expanded: keys and values of all heads are made from the latents first, which is cheaper if
many rows read the same keys.

Expanded keys and values of a level may be stored as copies, in whole blocks of pages of the same
pool as the latents. In a pass with many rows, such as that of a long prompt, they are made during
the pass, chunk by chunk. All parts are merged in the space of the values.

Legend: T query rows, H heads, N numbers of a head's key that are made from a latent, V numbers of a
head's value, R rank, P rotated numbers, K = N + P, X = N + V, L keys of a chunk, B blocks of pages,
D = R + P.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Unpack

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.spec import LatentSpec
from treegen.ops.attention.api import AttendOptions, attend, prepare_host
from treegen.ops.attention.key_selection import read_slots
from treegen.ops.attention.level import HostLevel, memoize
from treegen.ops.attention.merge import merge
from treegen.ops.attention.types import PreparedLevels
from treegen.ops.kernel_modules import import_kernels

_PIECE: Final = 2**26  # largest number of elements in the keys and values of a chunk


def attend_latents(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    levels: PreparedLevels,
    **options: Unpack[AttendOptions],
) -> Tensor:
    """Attend each query row to the latents of its groups, over all levels, in one softmax.

    Args:
        q_THK: Queries [T, H, K]; the last P numbers of each head are rotated.
        pool: Latents, each followed by its rotated numbers [num_pages, page_size, 1, R + P].
        up_HXR: Weights that make keys and values from a latent [H, X, R].
        form: Sizes of the latents and heads.
        levels: The levels, prepared by `treegen.ops.attention.prepare`.
        options: As in `treegen.ops.attention.attend`; `scale` is required.

    Returns:
        Results [T, H, V] in the type of q.

    Raises:
        InputError: the implementation does not support heads of this width.
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
        if not split.pieces and q_THK.device.type == "cuda" and q_THK.dtype != torch.float64:
            kernels = import_kernels("treegen.ops.attention.gpu.latent_kernels")
            if kernels is not None:  # one launch merges the two results
                merged: Tensor = kernels.merge_pair(out_THV, lse_TH, *part)
                return merged
        out_THV, lse_TH = merge((out_THV.to(wide), part[0].to(wide)), (lse_TH, part[1]))
    out_THV = out_THV.to(wide)
    for piece in split.pieces:
        expanded = _expand_latents(pool, piece.slots_L, up_HXR, form, q_THK.dtype)
        keys, values = (tensor.unflatten(0, (-1, pool.shape[1])) for tensor in expanded)
        rows = piece.rows
        part = attend(q_THK[rows], keys, values, piece.level, return_lse=True, **options)
        outs, lses = (out_THV[rows], part[0].to(wide)), (lse_TH[rows], part[1])
        out_THV[rows], lse_TH[rows] = merge(outs, lses)
    return out_THV.to(q_THK.dtype)


def _attend_absorbed(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    levels: PreparedLevels,
    options: AttendOptions,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend to levels that are read as latents; out [T, H, V] in the type of q, LSE [T, H]."""
    up_HNR, up_HVR = up_HXR.split([form.nope, form.v_dim], 1)
    q_THN, q_THP = q_THK.split([form.nope, form.rope], -1)
    q_THD = q_THK.new_empty(len(q_THK), form.heads, form.cached_dim)
    torch.bmm(q_THN.transpose(0, 1), up_HNR, out=q_THD[..., : form.rank].transpose(0, 1))
    q_THD[..., form.rank :] = q_THP
    options = {**options, "sinks": sinks}
    out_THR, lse_TH = attend(
        q_THD, pool, pool[..., : form.rank], levels, return_lse=True, **options
    )
    return torch.bmm(out_THR.transpose(0, 1), up_HVR.mT).transpose(0, 1), lse_TH


def view_expanded(pool: Tensor, form: LatentSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of a pool as expanded keys [B, page_size, H, K] and values [B, page_size, H, V].

    Block b occupies the `form.copy_pages` pages that start at page b * copy_pages.

    Args:
        pool: Pages of latents [num_pages, page_size, 1, R + P].
        form: Sizes of the latents and heads.
        dtype: Type of the expanded keys and values.
    """
    num_pages, page_size = pool.shape[:2]
    pages = form.copy_pages(pool.itemsize, dtype.itemsize)
    blocks = (
        pool[: num_pages // pages * pages].view(-1, page_size, pages * form.cached_dim).view(dtype)
    )
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
    """Expand some latents, and write their keys and values into the pool's blocks.

    Args:
        pool: Latents and blocks of expanded keys and values [num_pages, page_size, 1, R + P].
        slots_L: Cache slots of the latents [L], page * page_size + offset.
        targets_L: Where the keys and values go [L], block * page_size + offset.
        up_HXR: Weights that make keys and values from a latent [H, X, R].
        form: Sizes of the latents and heads.
        dtype: Type of the expanded keys and values.
    """
    num = get_chunk_size(form)
    for slots, targets in zip(slots_L.split(num), targets_L.split(num), strict=True):
        expanded = _expand_latents(pool, slots, up_HXR, form, dtype)
        for copies, new in zip(view_expanded(pool, form, dtype), expanded, strict=True):
            copies.flatten(0, 1)[targets] = new


def get_chunk_size(form: LatentSpec) -> int:
    """Return the number of tokens whose latents are expanded at once."""
    return max(_PIECE // form.expanded, 1)


def _expand_latents(
    pool: Tensor, slots_L: Tensor, up_HXR: Tensor, form: LatentSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys [L, H, K] and values [L, H, V] expanded from the latents in some slots."""
    return expand_stored(read_slots(pool, slots_L, dtype)[:, 0], up_HXR, form)


def expand_stored(stored_LD: Tensor, up_HXR: Tensor, form: LatentSpec) -> tuple[Tensor, Tensor]:
    """Return keys [L, H, K] and values [L, H, V] expanded from latents.

    Args:
        stored_LD: Latents, each followed by its rotated numbers [L, D].
        up_HXR: Weights that make keys and values from a latent [H, X, R].
        form: Sizes of the latents and heads.
    """
    latent_LR, rotated_LP = stored_LD.split([form.rank, form.rope], -1)
    expanded_LHX = (latent_LR @ up_HXR.flatten(0, 1).T).unflatten(-1, (form.heads, -1))
    nope_LHN, v_LHV = expanded_LHX.split([form.nope, form.v_dim], -1)
    k_LHK = torch.cat([nope_LHN, rotated_LP[:, None].expand(-1, form.heads, -1)], -1)
    return k_LHK, v_LHV


# Passes with many rows


@dataclass(frozen=True, slots=True)
class _ExpandedChunk:
    """Some latents of one group that are expanded during the pass."""

    rows: slice
    """The rows of the group."""
    slots_L: Tensor
    """The cache slots of the latents, filled up to whole pages."""
    level: PreparedLevels
    """The level of these rows and keys."""


@dataclass(frozen=True, slots=True)
class _LevelSplit:
    """The levels of a pass, split into those read as latents and chunks to expand."""

    stored: PreparedLevels
    """The levels that are read as latents."""
    pieces: tuple[_ExpandedChunk, ...] = ()
    """The chunks to expand."""
    is_all: bool = False
    """Whether the chunks contain all keys."""


def rows_to_expand(form: LatentSpec) -> float:
    """Return the number of rows from which expanding latents during the pass costs less.

    Expanding takes one more product. In return, each row and head reads keys and values that are
    narrower than latents. The result is infinite if they are not narrower.
    """
    saved = form.cached_dim + form.rank - form.k_dim - form.v_dim
    added = form.rank * (form.nope + form.v_dim)
    return added / saved if saved > 0 else float("inf")


def _split(levels: PreparedLevels, form: LatentSpec, pool: Tensor) -> _LevelSplit:
    """Split the levels of a pass, once for all layers with these sizes."""
    if not levels.expands:
        return _LevelSplit(levels)
    page_size = pool.shape[1]
    return memoize(levels.memo, (form, page_size), lambda: _make_split(levels, form, page_size))


def _make_split(levels: PreparedLevels, form: LatentSpec, page_size: int) -> _LevelSplit:
    stored, pieces = [], []
    for level in levels.levels:
        wide_G = level.stop_G - level.start_G >= rows_to_expand(form)
        pieces += [
            piece
            for group in np.flatnonzero(wide_G)
            for piece in _pieces(level, int(group), levels, form, page_size)
        ]
        # Groups that are read as chunks have no keys in the stored level.
        stored.append(replace(level, kv_len_G=np.where(wide_G, 0, level.kv_len_G), memo={}))
    if not pieces:
        return _LevelSplit(levels)
    remaining = prepare_host(stored, levels.positions_T, levels.device, levels.implementation)
    is_all = not any(level.kv_len_G.any() for level in stored) and levels.copies is None
    return _LevelSplit(remaining, tuple(pieces), is_all)


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
