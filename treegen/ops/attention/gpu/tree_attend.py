"""Launches of the kernels over packed trees, and which blocks of scores they compute.

Legend: T tokens, H query heads, G key heads, K key dimension, V value dimension, I row blocks, J
key blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device, use_device
from treegen.ops.attention.gpu import tree_kernels
from treegen.ops.attention.gpu.launch import block_of
from treegen.ops.attention.gpu.tuning import shared_memory
from treegen.ops.attention.level import IntArray, memoize
from treegen.ops.attention.tree import TreeLayout
from treegen.ops.attention.types import AttentionOptions, Window

_MIN_PROGRAMS: Final = 1024
"""Number of programs from which one program computes all query heads of a key block."""


class TileSizes(NamedTuple):
    """The sizes of a kernel's blocks."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Sizes for the kernels of outputs, of gradients of queries, and of those of keys, by the bytes of
# the wider one of a key and a value, for a GPU with much shared memory. An H100 was measured.
_TILES: Final = {
    128: (TileSizes(64, 64, 4, 3), TileSizes(64, 64, 4, 3), TileSizes(64, 64, 4, 3)),
    256: (TileSizes(64, 64, 4, 3), TileSizes(64, 32, 4, 3), TileSizes(32, 64, 4, 3)),
    512: (TileSizes(64, 32, 4, 2), TileSizes(32, 32, 4, 2), TileSizes(32, 32, 4, 2)),
}
_MUCH_MEMORY: Final = 160 << 10  # shared memory per program, in bytes


def can_attend(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernels take queries [H, T, K] and values [G, T, V], and are faster."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    return q.dtype in (torch.bfloat16, torch.float16) and _size(q, v) in _TILES


def _size(q: Tensor, v: Tensor) -> int:
    """Return the size of blocks, by which tiles are chosen."""
    size = q.dtype.itemsize * max(block_of(q.shape[-1]), block_of(v.shape[-1]), 64)
    return size if shared_memory(q.device) > _MUCH_MEMORY else 2 * size


def visible_blocks(
    stops_T: IntArray, positions_T: IntArray, window: Window | None, rows: int, keys: int
) -> NDArray[np.bool_]:
    """Return which blocks of scores need no mask, and which need one [I, 2, J].

    Args:
        stops_T: The end of the subtree of each token's segment.
        positions_T: The position of each token in its texts.
        window: The positions that a row sees; None for all.
        rows: Rows of a block.
        keys: Keys of a block.
    """
    num = len(stops_T)
    row_starts, key_starts = np.arange(0, num, rows), np.arange(0, num, keys)
    row_ends = np.minimum(row_starts + rows, num)[:, None] - 1
    key_ends = np.minimum(key_starts + keys, num) - 1
    first_stops, last_stops = (f.reduceat(stops_T, key_starts) for f in (np.minimum, np.maximum))
    is_some = (key_starts <= row_ends) & (last_stops > row_starts[:, None])
    is_whole = (key_ends <= row_starts[:, None]) & (first_stops > row_ends)
    if window is not None:
        starts_T = window.start(positions_T)
        is_some &= (
            np.maximum.reduceat(positions_T, key_starts)
            >= (np.minimum.reduceat(starts_T, row_starts)[:, None])
        )
        is_whole &= (
            np.minimum.reduceat(positions_T, key_starts)
            >= (np.maximum.reduceat(starts_T, row_starts)[:, None])
        )
    is_whole[:, -1] &= num % keys == 0
    return np.stack([is_whole & is_some, is_some & ~is_whole], 1)


class TreeKernels:
    """The attention of one layer over a packed tree, forward and backward.

    Queries, keys and values are contiguous, with heads first.
    """

    def __init__(self, layout: TreeLayout, options: AttentionOptions) -> None:
        """Store the tree and the options of a layer.

        Args:
            layout: The segments of the tree.
            options: Softmax options of the layer.
        """
        self._layout, self._options = layout, options

    def attend(
        self, q_HTK: Tensor, k_GTK: Tensor, v_GTV: Tensor, sinks_H: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [H, T, V], and their LSEs [H, T] in float32.

        Args:
            q_HTK: Queries.
            k_GTK: Keys.
            v_GTV: Values.
            sinks_H: A further logit of each head; None for none.
        """
        heads, num, _ = q_HTK.shape
        out_HTV = v_GTV.new_empty(heads, num, v_GTV.shape[-1])
        lses_HT = q_HTK.new_empty(heads, num, dtype=torch.float32)
        sinks_H, has_sinks = (lses_HT, 0) if sinks_H is None else (sinks_H.contiguous(), 1)
        arrays = q_HTK, k_GTK, v_GTV, sinks_H, out_HTV, lses_HT
        tiles, _, _ = _TILES[_size(q_HTK, v_GTV)]
        grid = -(-num // tiles.rows), heads
        self._launch(tree_kernels.attend_rows, tiles, grid, arrays, HAS_SINKS=has_sinks)
        return out_HTV, lses_HT

    def differentiate(
        self,
        q_HTK: Tensor,
        k_GTK: Tensor,
        v_GTV: Tensor,
        out_HTV: Tensor,
        lses_HT: Tensor,
        grad_HTV: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, and dots of outputs and grad_HTV.

        Args:
            q_HTK: Queries.
            k_GTK: Keys.
            v_GTV: Values.
            out_HTV: The outputs of `attend`.
            lses_HT: Their LSEs.
            grad_HTV: The gradients of the outputs.
        """
        (heads, num, _), groups = q_HTK.shape, len(k_GTK)
        grad_HTV = grad_HTV.contiguous()
        dq_HTK, dots_HT = torch.empty_like(q_HTK), torch.empty_like(lses_HT)
        _, tiles, key_tiles = _TILES[_size(q_HTK, v_GTV)]
        grid = -(-num // tiles.rows), heads
        arrays = q_HTK, k_GTK, v_GTV, out_HTV, grad_HTV, lses_HT, dots_HT, dq_HTK
        self._launch(tree_kernels.differentiate_rows, tiles, grid, arrays)
        blocks = -(-num // key_tiles.keys)
        # Few programs would leave multiprocessors idle while the first keys are computed.
        together = heads // groups if blocks * groups >= _MIN_PROGRAMS else 1
        parts = heads // together
        dtype = k_GTK.dtype if parts == groups else torch.float32
        dk, dv = (x.new_empty(parts, *x.shape[1:], dtype=dtype) for x in (k_GTK, v_GTV))
        arrays = q_HTK, k_GTK, v_GTV, grad_HTV, lses_HT, dots_HT, dk, dv
        grid = blocks, parts
        self._launch(tree_kernels.differentiate_keys, key_tiles, grid, arrays, HEADS=together)
        if parts != groups:
            dk, dv = (x.unflatten(0, (groups, -1)).sum(1).to(k_GTK.dtype) for x in (dk, dv))
        return dq_HTK, dk, dv, dots_HT

    def _launch(
        self,
        kernel: Any,
        tiles: TileSizes,
        grid: tuple[int, int],
        arrays: Sequence[Tensor],
        **constants: int,
    ) -> None:
        q, k, v = arrays[:3]
        window, softcap = self._options.window, self._options.softcap
        by_key = kernel is tree_kernels.differentiate_keys
        with use_device(q.device):
            kernel[grid](
                *arrays,
                *self._blocks(tiles, by_key, q.device),
                q.shape[1],
                self._options.scale,
                softcap or 0.0,
                0 if window is None else window.size,
                R=len(q) // len(k),
                K=q.shape[2],
                V=v.shape[2],
                BLOCK_K=block_of(q.shape[2]),
                BLOCK_V=block_of(v.shape[2]),
                BLOCK_M=tiles.rows,
                BLOCK_N=tiles.keys,
                HAS_WINDOW=0 if window is None else 1 + window.is_chunk,
                HAS_CAP=softcap is not None,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                **constants,
            )

    def _blocks(self, tiles: TileSizes, by_key: bool, device: torch.device) -> tuple[Tensor, ...]:
        """Return the numbers of blocks, the ends of their parts, and the layout of tokens."""
        window = self._options.window

        def list_blocks() -> tuple[Tensor, Tensor]:
            arrays = self._layout.token_stops(), self._layout.positions()
            visible = visible_blocks(*arrays, window, tiles.rows, tiles.keys)
            if by_key:
                visible = visible.transpose(2, 1, 0)
            ends = np.append(0, visible.sum(2).cumsum())
            numbers = np.append(visible.nonzero()[2], 0)  # never empty
            on_device = [to_device(array.astype(np.int32), device) for array in (numbers, ends)]
            return on_device[0], on_device[1]

        def list_token_layout() -> Tensor:
            layout = np.concatenate([self._layout.token_stops(), self._layout.positions()])
            return to_device(layout.astype(np.int32), device)

        memo = self._layout.memo
        blocks = memoize(memo, (tiles[:2], by_key, window, device), list_blocks)
        return *blocks, memoize(memo, ("token_layout", device), list_token_layout)
