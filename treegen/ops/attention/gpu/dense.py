"""Attention to keys that all rows read (the trunk of a tree) by torch's dense kernel.

The kernel (cuDNN's) is about twice as fast as one that follows page tables, and reads keys in place
if their pages are consecutive. It does not split keys, so few rows would leave most of the GPU
idle; keys are then cut into chunks, which the kernel computes as a batch. Each new shape costs
50 ms or more, which decode steps soon recover; prefill passes, whose shapes may occur only once,
use the kernel only for long work, in rounded sizes that recur.

Legend: T query rows, H query heads, K key heads, D width, C chunks, N keys of a chunk, R rows
including padding, F query heads that are folded into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from treegen.ops.attention.gpu.work_units import WorkShape
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.types import AttentionOptions

_MIN_KEYS = 512  # fewer keys are computed faster together with the other levels
_MIN_WORK = 6 * 2**20  # rows x query heads x keys; less is computed faster with the other levels
_CHUNK = 1024  # smallest number of keys of a chunk
_ALIGN = 64  # numbers of rows, and of keys where they are cut, are multiples of this
_TILE = 128  # query rows that one multiprocessor computes at a time
_PASS_MIN_WORK = 2**30  # _MIN_WORK of a prefill pass
_WIDE = (192, 128), (256, 256)  # widths of keys and values beyond 128
_PASS_ALIGN = 512  # numbers of a prefill pass's rows and dense keys are multiples of this


@dataclass(frozen=True, slots=True)
class DenseRun:
    """The first keys of one level, in consecutive pages, cut into chunks of equal size."""

    level: int
    """Index of the level."""
    first_page: int
    """The first of the consecutive pages."""
    chunk_keys: int
    """Keys per chunk."""
    num_chunks: int
    """Number of chunks."""
    rows: int
    """Number of query rows, including padding."""
    fold: int
    """Number of query heads that are folded into rows, so that few rows waste less of a tile."""

    @property
    def num_keys(self) -> int:
        """The number of keys of all chunks."""
        return self.chunk_keys * self.num_chunks


def find_run(
    levels: Sequence[HostLevel], shape: WorkShape, live_rows: int, processors: int
) -> DenseRun | None:
    """Return the longest run of keys that all live rows read; None if no run is long enough.

    Args:
        levels: The levels.
        shape: Layer properties on which the run depends.
        live_rows: Number of query rows without padding.
        processors: Multiprocessors of the GPU.
    """
    num_rows, kv_heads, per_head = shape.num_rows, shape.kv_heads, shape.per_head
    is_pass = any(level.causal for level in levels)
    align, min_work = (_PASS_ALIGN, _PASS_MIN_WORK) if is_pass else (_ALIGN, _MIN_WORK)
    rows = -(-num_rows // align) * align
    tiles, folded = (
        kv_heads * (per_head // fold) * -(-rows * fold // _TILE) for fold in (1, per_head)
    )
    fold = per_head if folded <= 0.75 * tiles else 1
    tiles = min(folded, tiles)
    best: DenseRun | None = None
    for index, level in enumerate(levels):
        is_one_group = level.start_G.size == 1
        has_all_rows = is_one_group and (level.start_G[0], level.stop_G[0]) == (0, live_rows)
        if level.causal or not has_all_rows:
            continue
        keys = int(level.kv_len_G[0])
        if is_pass:
            keys = keys // align * align
        pages = level.pages_GP[0, : -(-keys // shape.page_size)]
        longest = best.num_keys if best is not None else _MIN_KEYS - 1
        if keys <= longest or keys * num_rows * kv_heads * per_head < min_work:
            continue
        if (np.diff(pages) != 1).any():
            continue
        chunks = max(1, min(processors // tiles, keys // _CHUNK))
        size = keys if chunks == 1 else keys // chunks // _ALIGN * _ALIGN
        best = DenseRun(index, int(pages[0]), size, chunks, rows, fold)
    return best


def can_attend_dense(
    q_THD: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> bool:
    """Return whether the dense kernel supports a layer's tensors and options on its device.

    Args:
        q_THD: Queries [T, H, D].
        keys: Keys of the pool.
        values: Values of the pool.
        options: Softmax options of the layer.
    """
    widths = keys.shape[3], values.shape[3]
    narrow = widths[0] == widths[1] <= 128 and widths[0] % 8 == 0
    # Latent attention with expanded keys: each query head has a key head of its own.
    wide = widths in _WIDE and keys.shape[2] == q_THD.shape[1]
    return (
        options.window is None
        and options.softcap is None
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and (narrow or wide)
        and q_THD.device.type == "cuda"
        and _is_available(q_THD.device.index, *(widths if wide else (64, 64)))
    )


def attend_dense(
    q_THD: Tensor, keys: Tensor, values: Tensor, run: DenseRun, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend all rows to a run of keys, chunk by chunk.

    Args:
        q_THD: Queries [T, H, D].
        keys: Keys of the pool.
        values: Values of the pool.
        run: The run of keys, with R = run.rows and F = run.fold.
        scale: Factor of the logits.

    Returns:
        Results [C, R, F, H / F, D] in the type of q, and natural LSE [C, H / F, R, F] in float32.
    """
    start = run.first_page * keys.shape[1]
    k_CKND, v_CKND = (
        pool.view(-1, *pool.shape[2:])[start : start + run.num_keys]
        .to(q_THD.dtype)  # converts FP8; one more read is cheap compared with many rows
        .unflatten(0, (run.num_chunks, run.chunk_keys))
        .transpose(1, 2)
        for pool in (keys, values)
    )
    q_RHD = q_THD
    if run.rows > len(q_THD):
        q_RHD = torch.nn.functional.pad(q_THD, (0, 0, 0, 0, 0, run.rows - len(q_THD)))
    if run.fold > 1:
        q_RHD = q_RHD.unflatten(1, (-1, run.fold)).transpose(1, 2).flatten(0, 1)
    q_CHRD = q_RHD.transpose(0, 1).expand(run.num_chunks, -1, -1, -1)
    out_CHRD, lse = _attend(q_CHRD, k_CKND, v_CKND, scale)
    out = out_CHRD.transpose(1, 2).contiguous().unflatten(1, (run.rows, run.fold))
    return out, lse.reshape(run.num_chunks, -1, run.rows, run.fold)


def _attend(q_CHRD: Tensor, k_CKND: Tensor, v_CKND: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Call the kernel; returns out [C, H, R, D], and LSE [C, H, R] or [C, H, R, 1]."""
    out_CHRD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_CHRD, k_CKND, v_CKND, None, True, scale=scale
    )
    return out_CHRD, lse


@cache
def _is_available(index: int, k_dim: int, v_dim: int) -> bool:
    """Return whether to use the kernel on a GPU; before Hopper it is no faster than Triton's."""
    if torch.cuda.get_device_capability(index)[0] < 9 or not torch.backends.cudnn.is_available():
        return False
    x = torch.zeros(1, 2, 128, k_dim, dtype=torch.bfloat16, device=f"cuda:{index}")
    try:
        _attend(x, x[:, :1], x[:, :1, :, :v_dim], 1.0)
    except RuntimeError:
        return False
    return True
