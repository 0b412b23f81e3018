"""Launches of the kernels over packed trees, and which blocks of scores they compute.

Legend: T tokens, H query heads, G key heads, K key dimension, V value dimension, I row blocks, J
key blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device, use_device
from treegen.ops.attention.gpu import tree_kernels
from treegen.ops.attention.gpu.launch import block_of
from treegen.ops.attention.gpu.tuning import shared_memory
from treegen.ops.attention.types import AttentionOptions, Window

IntArray = NDArray[np.int64]

_MANY: Final = 1024
"""Number of programs from which one program computes all query heads of a key block."""


class Tiles(NamedTuple):
    """The sizes of a kernel's blocks."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By the bytes of the wider one of a key and a value, for a GPU with much shared memory.
_ROW_TILES: Final = {
    128: Tiles(128, 64, 4, 3),
    256: Tiles(128, 64, 8, 3),
    512: Tiles(64, 32, 4, 2),
}
_QUERY_TILES: Final = {
    128: Tiles(128, 64, 8, 3),
    256: Tiles(64, 64, 4, 2),
    512: Tiles(64, 32, 8, 1),
}
_KEY_TILES: Final = {
    128: Tiles(64, 128, 8, 3),
    256: Tiles(32, 128, 8, 2),
    512: Tiles(32, 64, 8, 1),
}
_WIDEST: Final = max(_ROW_TILES)
_MUCH_MEMORY: Final = 160 << 10  # shared memory per program, in bytes


def can_attend(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernels take queries [H, T, K] and values [G, T, V], and are faster."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    return q.dtype in (torch.bfloat16, torch.float16) and _size(q, v) <= _WIDEST


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
    """The attention of one layer over a packed tree, forward and backward."""

    def __init__(
        self,
        stops_T: IntArray,
        positions_T: IntArray,
        options: AttentionOptions,
        memo: dict[Any, Any],
    ) -> None:
        """Prepare a layer.

        Args:
            stops_T: The end of the subtree of each token's segment.
            positions_T: The position of each token in its texts.
            options: Softmax options of the layer.
            memo: What layers of one tree share: blocks and places on the device.
        """
        self._stops_T, self._positions_T = stops_T, positions_T
        self._options, self._memo = options, memo

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
        q, k, v = (x.contiguous() for x in (q_HTK, k_GTK, v_GTV))
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        lses = q.new_empty(q.shape[:-1], dtype=torch.float32)
        sinks = lses if sinks_H is None else sinks_H.contiguous()
        tiles = _ROW_TILES[_size(q, v)]
        self._launch(
            tree_kernels.attend_rows,
            tiles,
            (q, k, v),
            (q, k, v, sinks, out, lses),
            (-(-q.shape[1] // tiles.rows), len(q)),
            HAS_SINKS=sinks_H is not None,
        )
        return out, lses

    def differentiate(
        self,
        q_HTK: Tensor,
        k_GTK: Tensor,
        v_GTV: Tensor,
        grad_HTV: Tensor,
        lses_HT: Tensor,
        dots_HT: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            q_HTK: Queries.
            k_GTK: Keys.
            v_GTV: Values.
            grad_HTV: The gradients of the outputs.
            lses_HT: The LSEs of `attend`.
            dots_HT: The products of outputs and their gradients.
        """
        q, k, v, grad = (x.contiguous() for x in (q_HTK, k_GTK, v_GTV, grad_HTV))
        (heads, num, _), groups = q.shape, len(k)
        inputs = q, k, v, grad, lses_HT, dots_HT
        size = _size(q, v)
        dq = torch.empty_like(q)
        tiles = _QUERY_TILES[size]
        grid = -(-num // tiles.rows), heads
        self._launch(tree_kernels.differentiate_rows, tiles, (q, k, v), (*inputs, dq), grid)
        tiles = _KEY_TILES[size]
        blocks = -(-num // tiles.keys)
        # Few programs would leave multiprocessors idle while the first keys are computed.
        together = heads // groups if blocks * groups >= _MANY else 1
        parts = heads // together
        dtype = k.dtype if parts == groups else torch.float32
        dk, dv = (x.new_empty(parts, *x.shape[1:], dtype=dtype) for x in (k, v))
        self._launch(
            tree_kernels.differentiate_keys,
            tiles,
            (q, k, v),
            (*inputs, dk, dv),
            (blocks, parts),
            HEADS=together,
        )
        if parts != groups:
            dk, dv = (x.unflatten(0, (groups, -1)).sum(1).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv

    def _launch(
        self,
        kernel: Any,
        tiles: Tiles,
        inputs: Sequence[Tensor],
        arrays: Sequence[Tensor],
        grid: tuple[int, int],
        **constants: int,
    ) -> None:
        q, k, v = inputs
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

    def _blocks(self, tiles: Tiles, by_key: bool, device: torch.device) -> tuple[Tensor, ...]:
        """Return the numbers of blocks, the ends of their parts, and the places of tokens."""
        window = self._options.window

        def list_blocks() -> tuple[Tensor, Tensor]:
            arrays = self._stops_T, self._positions_T, window
            visible = visible_blocks(*arrays, tiles.rows, tiles.keys)
            if by_key:
                visible = visible.transpose(2, 1, 0)
            ends = np.append(0, visible.sum(2).cumsum())
            numbers = np.append(visible.nonzero()[2], 0)  # never empty
            return tuple(to_device(array.astype(np.int32), device) for array in (numbers, ends))

        def list_places() -> Tensor:
            places = np.concatenate([self._stops_T, self._positions_T])
            return to_device(places.astype(np.int32), device)

        blocks = self._once((tiles[:2], by_key, window, device), list_blocks)
        return *blocks, self._once(("places", device), list_places)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]
