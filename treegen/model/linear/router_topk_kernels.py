"""The Triton kernel that finds the few largest numbers of short rows."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_ROWS: Final = 4  # rows per program


@triton.jit(do_not_specialize=["num_rows"])
def _largest(
    scores,
    values,
    indices,
    num_rows,
    E: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the NUM largest scores of some rows, by taking the largest remaining score NUM times.

    Args:
        scores: Pointer to scores [num_rows, E].
        values: Pointer to the largest scores [num_rows, NUM]; written.
        indices: Pointer to their indices, int64 [num_rows, NUM]; written.
        num_rows: The number of rows.
        E: Scores per row.
        NUM: Scores to find.
        BLOCK_E: E rounded up to a power of two.
        ROWS: Rows per program.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live_R = row < num_rows
    e = tl.arange(0, BLOCK_E)
    is_score = live_R[:, None] & (e < E)[None, :]
    x_RE = tl.load(scores + row[:, None] * E + e[None, :], mask=is_score, other=0.0).to(tl.float32)
    x_RE = tl.where(x_RE != x_RE, float("inf"), x_RE)
    left_RE = (e < E)[None, :] & (row >= 0)[:, None]
    for place in tl.static_range(NUM):
        best_R = tl.max(tl.where(left_RE, x_RE, -float("inf")), 1)
        at_R = tl.min(tl.where(left_RE & (x_RE == best_R[:, None]), e[None, :], BLOCK_E), 1)
        value_R = tl.load(scores + row * E + at_R, mask=live_R, other=0.0)
        tl.store(values + row * NUM + place, value_R, mask=live_R)
        tl.store(indices + row * NUM + place, at_R.to(tl.int64), mask=live_R)
        left_RE = left_RE & (e[None, :] != at_R[:, None])


def largest(scores: Tensor, values: Tensor, indices: Tensor) -> None:
    """Fill values and indices as documented in `treegen.model.compiled.topk_rows`.

    Args:
        scores: Scores [..., E].
        values: The largest scores [..., num], dense; overwritten.
        indices: Their indices, int64 [..., num], dense; overwritten.
    """
    width, num = scores.shape[-1], values.shape[-1]
    num_rows = values.numel() // num
    if num_rows:
        _largest[(triton.cdiv(num_rows, _ROWS),)](
            scores.contiguous(),
            values,
            indices,
            num_rows,
            E=width,
            NUM=num,
            BLOCK_E=triton.next_power_of_2(width),
            ROWS=_ROWS,
        )
