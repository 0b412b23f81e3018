"""Attention with gradients over a packed prefix tree, for training.

The tokens of a tree are packed depth first: a segment stands right before the segments below it, so
the queries that see a segment's keys are the consecutive tokens of its subtree. Each segment is
computed as a level: all queries below it attend to its keys in one product, and online softmax
merges the levels of a query. The backward pass goes over the same blocks, so the gradients of
shared keys and values are sums over all rows below. Keys, values and masks are never repeated for
the samples. At any time only one block of scores exists.

Legend: T packed tokens, H query heads, G key heads, R query heads per key head, N query rows of a
block, L keys of a block, K key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from treegen.common.device import to_device, without_autocast
from treegen.ops.attention.level import memoize
from treegen.ops.attention.types import AttentionOptions, Window
from treegen.ops.kernel_modules import import_kernels

_KEYS: Final = 512
"""Maximum number of keys of a block."""
_PACKED: Final = 128
"""Maximum number of tokens of small subtrees and short segments that share a block."""
_SHORT: Final = 32
"""Maximum number of tokens of a short segment."""
_SCORES: Final = {"cpu": 2**19, "cuda": 2**26}
"""Maximum number of scores of a block, by type of device."""


class _Tile(NamedTuple):
    """Consecutive keys: a part of a long segment, or whole small subtrees and short segments."""

    start: int
    stop: int
    keys: NDArray[np.int64]  # the keys that tokens after the tile see
    rows_stop: int  # the end of the tokens that see these keys


class _Block(NamedTuple):
    """Query rows and keys whose scores are computed in one product."""

    rows: slice | Tensor
    keys: slice | Tensor
    mask: tuple[Tensor, Tensor] | None  # the indices of the rows [N] and of the keys [L], if masked


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """The location of a tree's segments among its packed tokens.

    Segments are numbered in packed order.
    """

    starts: NDArray[np.int64]
    """The first token of each segment."""
    stops: NDArray[np.int64]
    """The end of the subtree of each segment, in tokens."""
    depths: NDArray[np.int64]
    """The position of the first token of each segment in its texts."""
    num_tokens: int
    """T, the number of tokens."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Values that all layers use: blocks of scores, and arrays on a device."""

    def blocks(self, num_heads: int, window: Window | None, device: torch.device) -> list[_Block]:
        """Return the blocks of scores that cover all pairs of a query and a visible key.

        Args:
            num_heads: H.
            window: The positions that a row sees; None for all.
            device: The device of the queries.
        """
        max_scores = max(16, _SCORES["cpu" if device.type == "cpu" else "cuda"] // num_heads)
        key = "blocks", max_scores, window, device
        return memoize(self.memo, key, lambda: list(self._iter_blocks(max_scores, window, device)))

    def positions(self) -> NDArray[np.int64]:
        """Return the position of each token in its texts [T]."""
        return np.arange(self.num_tokens) + self._repeat(self.depths - self.starts)

    def token_stops(self) -> NDArray[np.int64]:
        """Return the end of the subtree of each token's segment [T]."""
        return self._repeat(self.stops)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the position of each token [T], and the end of its segment's subtree [T].

        Args:
            device: The device of the tensors.
        """

        def copy() -> tuple[Tensor, Tensor]:
            return to_device(self.positions(), device), to_device(self.token_stops(), device)

        return memoize(self.memo, ("tensors", device), copy)

    def _repeat(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the value of each token's segment [T]."""
        return np.repeat(values, np.diff(np.append(self.starts, self.num_tokens)))

    def _iter_tiles(self) -> Iterator[_Tile]:
        starts, num = np.append(self.starts, self.num_tokens), len(self.starts)
        after = np.searchsorted(self.starts, self.stops)  # the first segment after each subtree
        segment = 0
        while segment < num:
            start, end, short = int(starts[segment]), segment, []
            while end < num and starts[end + 1] <= start + _PACKED:
                if self.stops[end] <= start + _PACKED:
                    end = max(int(after[end]), end + 1)
                elif starts[end + 1] - starts[end] <= _SHORT:
                    short.append(end)
                    end += 1
                else:
                    break
            if end > segment:
                stop = int(starts[end])
                keys = [np.arange(starts[at], starts[at + 1]) for at in short]
                rows_stop = int(self.stops[short].max(initial=stop))
                yield _Tile(start, stop, np.concatenate([*keys, np.arange(0)]), rows_stop)
                segment = end
                continue
            stop = int(starts[segment + 1])
            for at in range(start, stop, _KEYS):
                end = min(at + _KEYS, stop)
                yield _Tile(at, end, np.arange(at, end), int(self.stops[segment]))
            segment += 1

    def _iter_blocks(
        self, max_scores: int, window: Window | None, device: torch.device
    ) -> Iterator[_Block]:
        positions_T, stops_T = self.positions(), self._repeat(self.stops)
        indices_T = torch.arange(self.num_tokens, device=device)
        for start, stop, keys_L, rows_stop in self._iter_tiles():
            step = max(1, max_scores // max(1, stop - start))
            for at in range(start, stop, step):
                keys = slice(start, min(at + step, stop))
                rows = slice(at, keys.stop)
                yield _Block(rows, keys, (indices_T[rows], indices_T[keys]))
            if not len(keys_L):
                continue
            rows_N = np.arange(stop, rows_stop)
            if window is not None:
                rows_N = rows_N[window.start(positions_T[rows_N]) <= positions_T[keys_L].max()]
            is_seen = (stops_T[keys_L] >= rows_stop).all()
            key_indices = torch.from_numpy(keys_L).to(device)
            for part in np.split(rows_N, range(step, len(rows_N), step)) if len(rows_N) else ():
                is_whole = is_seen and (
                    window is None
                    or window.start(positions_T[part]).max() <= positions_T[keys_L].min()
                )
                row_indices = torch.from_numpy(part).to(device)
                mask = None if is_whole else (row_indices, key_indices)
                yield _Block(_as_slice(part, row_indices), _as_slice(keys_L, key_indices), mask)


def _as_slice(indices: NDArray[np.int64], tensor: Tensor) -> slice | Tensor:
    """Return ascending indices as a slice, or as a tensor if some are left out."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else tensor


def attend_tree(
    q_HTK: Tensor, k_GTK: Tensor, v_GTV: Tensor, layout: TreeLayout, options: AttentionOptions
) -> Tensor:
    """Attend from each packed token to the tokens of its path up to itself, with gradients.

    Args:
        q_HTK: Queries [H, T, K].
        k_GTK: Keys [G, T, K]; H is a multiple of G.
        v_GTV: Values [G, T, V].
        layout: The segments of the tree.
        options: Softmax options of the layer.

    Returns:
        The attention output [H, T, V], in the type of the values.
    """
    operator: Any = _Levels(layout, options)
    kernels = import_kernels("treegen.ops.attention.gpu.tree_attend")
    if kernels is not None and kernels.can_attend(q_HTK, v_GTV):
        q_HTK, k_GTK, v_GTV = (x.contiguous() for x in (q_HTK, k_GTK, v_GTV))
        operator = kernels.TreeKernels(layout, options)
    out: Tensor = _TreeAttention.apply(q_HTK, k_GTK, v_GTV, options.sinks_H, operator)  # type: ignore[no-untyped-call]
    return out


class _TreeAttention(torch.autograd.Function):
    """Attention by an operator, which computes all scores again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, operator: Any
    ) -> Tensor:
        """Return the attention output [H, T, V] in the type of the values.

        Args:
            ctx: The context of autograd.
            q: Queries [H, T, K].
            k: Keys [G, T, K].
            v: Values [G, T, V].
            sinks: A further logit of each head [H]; None for none.
            operator: The layer's `_Levels` or `TreeKernels`.
        """
        with without_autocast(q.device):
            out: Tensor
            out, lse = operator.attend(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.operator = operator
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with without_autocast(q.device):
            dq, dk, dv, dots_HT = ctx.operator.differentiate(q, k, v, out, lse, grad_out)
            dsinks = None
            if sinks is not None:
                shares_HT = (sinks.to(lse.dtype)[:, None] - lse).exp()
                dsinks = -(shares_HT * dots_HT).sum(-1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None


class _Levels:
    """The attention of one layer block by block, with torch's operators."""

    def __init__(self, layout: TreeLayout, options: AttentionOptions) -> None:
        """Store the tree and the options of a layer.

        Args:
            layout: The segments of the tree.
            options: Softmax options of the layer.
        """
        self._layout, self._options = layout, options

    def attend(
        self, q_HTK: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [H, T, V] in the type of the values, and their LSEs [H, T].

        Args:
            q_HTK: Queries.
            k: Keys [G, T, K].
            v: Values [G, T, V].
            sinks_H: A further logit of each head; None for none.
        """
        q = q_HTK.unflatten(0, (len(k), -1))
        tree = _Scores(q, k, self._layout, self._options)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=tree.dtype, device=q.device)
        sums = q.new_zeros(q.shape[:-1], dtype=tree.dtype)
        # A finite number: the difference of two infinities would not be a number.
        max_GRT = torch.full_like(sums, torch.finfo(tree.dtype).min / 4)
        if sinks_H is not None:
            max_GRT[:] = sinks_H.to(tree.dtype).view(max_GRT.shape[:2])[..., None]
            sums += 1
        for block in tree.blocks:
            rows = block.rows
            s_GRNL, _ = tree.scores(block)
            max_GRN = torch.maximum(max_GRT[:, :, rows], s_GRNL.amax(-1))
            p_GRNL = s_GRNL.sub_(max_GRN[..., None]).exp_()
            alpha_GRN = (max_GRT[:, :, rows] - max_GRN).exp_()
            new_GRNV = (p_GRNL.to(v.dtype).flatten(1, 2) @ v[:, block.keys]).unflatten(
                1, p_GRNL.shape[1:3]
            )
            out[:, :, rows] = out[:, :, rows] * alpha_GRN[..., None] + new_GRNV
            sums[:, :, rows] = sums[:, :, rows] * alpha_GRN + p_GRNL.sum(-1)
            max_GRT[:, :, rows] = max_GRN
        out = (out / sums[..., None]).to(v.dtype)
        return out.flatten(0, 1), (max_GRT + sums.log()).flatten(0, 1)

    def differentiate(
        self, q_HTK: Tensor, k: Tensor, v: Tensor, out_HTV: Tensor, lse_HT: Tensor, grad_HTV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, and dots of outputs and grad_HTV.

        Args:
            q_HTK: Queries.
            k: Keys [G, T, K].
            v: Values [G, T, V].
            out_HTV: The outputs of `attend`.
            lse_HT: Their LSEs.
            grad_HTV: The gradients of the outputs.
        """
        dot_HT = (grad_HTV.to(lse_HT.dtype) * out_HTV).sum(-1)
        q, grad_out, lse, dot = (
            x.unflatten(0, (len(k), -1)) for x in (q_HTK, grad_HTV, lse_HT, dot_HT)
        )
        tree = _Scores(q, k, self._layout, self._options)
        dq, dk, dv = (torch.zeros_like(x, dtype=tree.dtype) for x in (q, k, v))
        for block in tree.blocks:
            rows, keys = block.rows, block.keys
            s_GRNL, slope_GRNL = tree.scores(block)
            p_GRNL = s_GRNL.sub_(lse[:, :, rows, None]).exp_()
            shape, grad_GMV = p_GRNL.shape[1:3], grad_out[:, :, rows].flatten(1, 2)
            dv[:, keys] += p_GRNL.to(v.dtype).flatten(1, 2).transpose(1, 2) @ grad_GMV
            d_GRNL = (grad_GMV @ v[:, keys].transpose(1, 2)).to(tree.dtype).unflatten(1, shape)
            d_GRNL.sub_(dot[:, :, rows, None]).mul_(p_GRNL)
            if slope_GRNL is not None:
                d_GRNL.mul_(slope_GRNL)
            d_GML = d_GRNL.mul_(self._options.scale).to(q.dtype).flatten(1, 2)
            dq[:, :, rows] += (d_GML @ k[:, keys]).unflatten(1, shape)
            dk[:, keys] += d_GML.transpose(1, 2) @ q[:, :, rows].flatten(1, 2)
        return dq.flatten(0, 1).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dot_HT


class _Scores:
    """Computes the scores of blocks, in float32 at least."""

    def __init__(self, q: Tensor, k: Tensor, layout: TreeLayout, options: AttentionOptions) -> None:
        """Prepare the blocks of one layer.

        Args:
            q: Queries [G, R, T, K].
            k: Keys [G, T, K].
            layout: The segments of the tree.
            options: Softmax options of the layer.
        """
        self._q, self._k, self._options = q, k, options
        self._positions_T, self._stops_T = layout.tensors(q.device)
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.blocks = layout.blocks(q.shape[0] * q.shape[1], options.window, q.device)

    def scores(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Return the masked scores of a block [G, R, N, L], and the slopes of their soft cap.

        Args:
            block: The block.
        """
        rows_GRNK = self._q[:, :, block.rows]
        s_GML = rows_GRNK.flatten(1, 2) @ self._k[:, block.keys].transpose(1, 2)
        s_GRNL = s_GML.to(self.dtype).mul_(self._options.scale).unflatten(1, rows_GRNK.shape[1:3])
        slope_GRNL = None
        if (cap := self._options.softcap) is not None:
            s_GRNL = s_GRNL.div_(cap).tanh_()
            slope_GRNL = 1 - s_GRNL.square()
            s_GRNL = s_GRNL.mul_(cap)
        if block.mask is not None:
            rows_N, keys_L = block.mask
            is_hidden_NL = keys_L > rows_N[:, None]
            is_hidden_NL |= self._stops_T[keys_L] <= rows_N[:, None]
            if (window := self._options.window) is not None:
                starts_N = window.start(self._positions_T[rows_N])
                is_hidden_NL |= self._positions_T[keys_L] < starts_N[:, None]
            s_GRNL.masked_fill_(is_hidden_NL, -torch.inf)
        return s_GRNL, slope_GRNL
