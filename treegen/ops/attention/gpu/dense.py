"""Keys that all rows read, by torch's dense kernel: the trunk of a tree on a recent GPU.

The kernel (cuDNN's) reaches about twice what a kernel that follows page tables does. It takes keys
where they lie, if their pages are consecutive. It does not split keys, so that few rows would leave
most of the GPU idle: keys are then cut into chunks, which it takes for a batch. A shape that it has
not seen costs it 50 ms and more, which a decode step soon gets back; of a prefill pass, whose shape
may come once, it is given long work only, in sizes that come again.

Legend: T query rows, H query heads, K key heads, D width, C chunks, N keys of a chunk, R rows with
those that pad them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from treegen.ops.attention.gpu.units import WorkShape
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.types import AttentionOptions

_MIN_KEYS = 512  # what is less is computed faster with the other levels
_MIN_WORK = 6 * 2**20  # rows x query heads x keys, likewise
_CHUNK = 1024  # keys at least
_ALIGN = 64  # numbers of rows, and of keys where they are cut, are multiples of it
_TILE = 128  # query rows that one multiprocessor computes at a time
_PASS_MIN_WORK = 2**30  # rows x query heads x keys of a prefill pass
_WIDE = (192, 128), (256, 256)  # widths of keys and values beyond 128
_PASS_ALIGN = 512  # numbers of its rows, and of the keys it is given, are multiples of it


@dataclass(frozen=True, slots=True)
class DenseRun:
    """The first keys of one level, in consecutive pages, cut into chunks of one size.

    rows: with those that pad them. fold: query heads that become rows, so that few rows waste less
    of a tile.
    """

    level: int
    first_page: int
    chunk_keys: int
    num_chunks: int
    rows: int
    fold: int

    @property
    def num_keys(self) -> int:
        """Keys of all chunks."""
        return self.chunk_keys * self.num_chunks


def find_run(
    levels: Sequence[HostLevel], shape: WorkShape, live_rows: int, processors: int
) -> DenseRun | None:
    """The longest run of keys that all live rows read, if it is long enough."""
    num_rows, kv_heads, per_head = shape.num_rows, shape.kv_heads, shape.per_head
    is_pass = any(level.causal for level in levels)
    align, min_work = (_PASS_ALIGN, _PASS_MIN_WORK) if is_pass else (_ALIGN, _MIN_WORK)
    rows = -(-num_rows // align) * align
    tiles, folded = (
        kv_heads * (per_head // fold) * -(-rows * fold // _TILE) for fold in (1, per_head)
    )
    fold = per_head if folded <= 0.75 * tiles else 1
    tiles = min(folded, tiles)
    found: DenseRun | None = None
    for index, level in enumerate(levels):
        is_whole = level.start_G.size == 1 and (level.start_G[0], level.stop_G[0]) == (0, live_rows)
        if level.causal or not is_whole:
            continue
        keys = int(level.kv_len_G[0])
        if is_pass:
            keys = keys // align * align
        pages = level.pages_GP[0, : -(-keys // shape.page_size)]
        longest = found.num_keys if found is not None else _MIN_KEYS - 1
        if keys <= longest or keys * num_rows * kv_heads * per_head < min_work:
            continue
        if (np.diff(pages) != 1).any():
            continue
        chunks = max(1, min(processors // tiles, keys // _CHUNK))
        size = keys if chunks == 1 else keys // chunks // _ALIGN * _ALIGN
        found = DenseRun(index, int(pages[0]), size, chunks, rows, fold)
    return found


def can_attend_dense(
    q_THD: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> bool:
    """Whether the dense kernel computes what a layer asks for, on its device."""
    widths = keys.shape[3], values.shape[3]
    narrow = widths[0] == widths[1] <= 128 and widths[0] % 8 == 0
    # Of latent attention: each query head has a key head of its own.
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
    """Out [C, R, F, H / F, D] in the type of q, and natural LSE [C, H / F, R, F] in float32.

    R: run.rows. F: run.fold.
    """
    start = run.first_page * keys.shape[1]
    k_CKND, v_CKND = (
        pool.view(-1, *pool.shape[2:])[start : start + run.num_keys]
        .to(q_THD.dtype)  # what is stored in FP8; to read it once more costs little beside the rows
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
    """The kernel: out [C, H, R, D], and LSE [C, H, R] or [C, H, R, 1]."""
    out_CHRD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_CHRD, k_CKND, v_CKND, None, True, scale=scale
    )
    return out_CHRD, lse


@cache
def _is_available(index: int, k_dim: int, v_dim: int) -> bool:
    """Whether the kernel runs on a GPU; on older ones than Hopper it is no faster than ours."""
    if torch.cuda.get_device_capability(index)[0] < 9 or not torch.backends.cudnn.is_available():
        return False
    x = torch.zeros(1, 2, 128, k_dim, dtype=torch.bfloat16, device=f"cuda:{index}")
    try:
        _attend(x, x[:, :1], x[:, :1, :, :v_dim], 1.0)
    except RuntimeError:
        return False
    return True
