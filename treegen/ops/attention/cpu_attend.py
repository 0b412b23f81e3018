"""Attention over levels on a CPU: PyTorch's flash kernel, with float32 merging of partial results.

Legend: T query rows, H query heads, D key dimension, V value dimension, S slots of the pool, P
parts to merge; in a job: B units, N rows of a unit, L keys of a unit, K key/value heads, R query
heads per key head, M rows of the kernel (N * R when heads of a key head are folded into rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treegen.ops.attention.cpu_jobs import CpuJob, CpuShape, plan_level
from treegen.ops.attention.level import HostLevel, IntArray, memoize
from treegen.ops.attention.merge import add_sinks, merge_in_place
from treegen.ops.attention.types import AttentionOptions, KVPairs, PreparedLevels

# Largest number of logits that the path of plain matrix products holds at once.
MAX_LOGITS: Final = 1 << 20
# Keys of a head that are FAR_BYTES or more apart map to few lines of a CPU cache. If at least
# FAR_ROWS rows read at least FAR_KEYS such keys, each head is first copied to dense memory. The
# kernel gives a thread up to 256 rows of a head at a time, so with several threads it takes
# BUSY_ROWS rows per thread to keep them equally busy.
FAR_BYTES: Final = 2 << 10
FAR_ROWS: Final = 256
FAR_KEYS: Final = 1024
BUSY_ROWS: Final = 8 * 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Cpu:
    """Attention on a CPU, computed in float32 (float64 for float64 tensors).

    16-bit keys are converted chunk by chunk. On CPUs this costs about as much as a 16-bit kernel
    would save, and partial results stay in float32 until they are merged.
    """

    name = "cpu"

    def refusal(self, device: torch.device) -> str | None:
        """Return None for a CPU, and the reason for refusal for any other device."""
        return None if device.type == "cpu" else f"requires CPU tensors, got {device}"

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> IntArray | None:
        """Return a copy of the positions. Plans are made at the first layer, whose heads are known.

        Args:
            levels: The levels, on the host.
            positions_T: Position of each query row [T]; None if nothing needs positions.
            device: Not used.
        """
        return None if positions_T is None else positions_T.to(torch.int64, copy=True).numpy()

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Run the jobs of all levels, then merge.

        Args:
            q_THD: Queries [T, H, D].
            pairs: Keys and values of each level.
            prepared: The levels.
            options: Softmax options of the layer.

        Returns:
            Results [T, H, V] in the type of q, and LSE [T, H] in float32 (float64 for float64).
        """
        dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
        num_rows, q_heads, k_dim = q_THD.shape
        v_dim = pairs[0][1].shape[-1]
        plans = []
        for index, (keys, values) in enumerate(pairs):
            shape = CpuShape(
                page_size=keys.shape[1],
                token_bytes=keys.shape[2] * max(k_dim, values.shape[3]) * dtype.itemsize,
                converts=keys.dtype != dtype,
                dtype=dtype,
                window=options.window,
            )
            make_plan = partial(plan_level, prepared.levels[index], prepared.state, num_rows, shape)
            plans.append(memoize(prepared.memo, ("plan", index, num_rows, shape), make_plan))
        complete = [is_complete for plan in plans for is_complete in plan.complete] or [False]
        # Jobs write every row of a complete part. In any other part, the rows that no job writes
        # have no key: out 0, LSE -inf.
        out_PTHV = q_THD.new_empty(len(complete), num_rows, q_heads, v_dim, dtype=dtype)
        lse_PTH = q_THD.new_empty(len(complete), num_rows, q_heads, dtype=dtype)
        for p, is_complete in enumerate(complete):
            if not is_complete:
                out_PTHV[p].zero_()
                lse_PTH[p].fill_(-torch.inf)
        rows_THD = q_THD.to(dtype)
        base = 0
        for (keys, values), plan in zip(pairs, plans, strict=True):
            k_SKD, v_SKV = keys.flatten(0, 1), values.flatten(0, 1)
            for job in plan.jobs:
                out_XHV, lse_XH = _run(job, rows_THD, k_SKD, v_SKV, options)
                p = base + job.part
                if isinstance(job.rows, slice):
                    out_PTHV[p, job.rows].view_as(out_XHV).copy_(out_XHV)
                    lse_PTH[p, job.rows].view_as(lse_XH).copy_(lse_XH)
                else:
                    out_PTHV[p].index_copy_(0, job.rows, out_XHV.reshape(-1, q_heads, v_dim))
                    lse_PTH[p].index_copy_(0, job.rows, lse_XH.reshape(-1, q_heads))
            base += len(plan.complete)
        if len(complete) == 1:
            out_THV, lse_TH = out_PTHV[0], lse_PTH[0]
        else:
            out_THV, lse_TH = merge_in_place(out_PTHV, lse_PTH)
        if options.sinks_H is not None:
            out_THV, lse_TH = add_sinks(out_THV, lse_TH, options.sinks_H)
        return out_THV.to(q_THD.dtype), lse_TH


def _run(
    job: CpuJob, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return out [B, N, H, V] or [B, N, K, R, V] of a job, and its LSE (the same without V)."""
    kv_heads, num_units, n = k_SKD.shape[1], job.num_units, job.num_rows
    per_head = q_THD.shape[1] // kv_heads
    q_XHD = q_THD[job.rows] if isinstance(job.rows, slice) else q_THD.index_select(0, job.rows)
    q_BNKRD = q_XHD.view(num_units, n, kv_heads, per_head, -1)
    k_dim, v_dim = k_SKD.shape[2], v_SKV.shape[2]
    plain = options.softcap is None and v_dim <= k_dim
    # Each key is read once if the query heads of a key head are folded into rows. The flash kernel
    # cannot fold them if a mask or diagonal differs between rows; such a job has enough rows.
    by_row = job.causal or (job.mask is not None and job.mask.shape[2] > 1)
    folds = not plain or n == 1 or not by_row
    if folds:
        q_BKMD = q_BNKRD.transpose(1, 2).reshape(num_units, kv_heads, n * per_head, -1)
    else:
        q_BKMD = q_XHD.view(num_units, n, kv_heads * per_head, -1).transpose(1, 2)
    # Values that are the first numbers of the keys need no read of their own.
    within = k_SKD.data_ptr() == v_SKV.data_ptr() and k_SKD.stride() == v_SKV.stride()
    total: tuple[Tensor, Tensor] | None = None
    for piece in job.pieces:
        k_BKLD = _keys(k_SKD, piece, num_units, q_THD.dtype)
        v_BKLV = k_BKLD if within else _keys(v_SKV, piece, num_units, q_THD.dtype)
        if plain:
            if v_BKLV.shape[3] < k_dim:  # the kernel needs equal widths; padding costs little
                v_BKLV = pad(v_BKLV, (0, k_dim - v_dim))
            call = _attend_by_head if folds and _should_copy_heads(q_BKMD, k_BKLD) else _flash
            out, lse = call(
                q_BKMD, k_BKLD, v_BKLV, 0.0, job.causal, attn_mask=job.mask, scale=options.scale
            )
        else:
            out, lse = _products(job, q_BKMD, k_BKLD, v_BKLV[..., :v_dim], options)
        if total is not None:
            out, lse = merge_in_place((total[0], out), torch.stack((total[1], lse)))
        total = out, lse
    out = out[..., :v_dim]
    if folds:
        out = out.unflatten(2, (n, per_head)).transpose(1, 2)
        lse = lse.reshape(num_units, kv_heads, n, per_head).transpose(1, 2)
    else:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if job.keyless_BN is not None:
        # The kernel gives rows without any visible key an LSE of 0.
        keyless = job.keyless_BN.view(num_units, n, *[1] * (lse.dim() - 2))
        out, lse = out.masked_fill(keyless[..., None], 0), lse.masked_fill(keyless, -torch.inf)
    return out, lse


def _should_copy_heads(q_BKMD: Tensor, k_BKLD: Tensor) -> bool:
    """Return whether copying each head's keys costs less than it saves."""
    key_stride, threads = k_BKLD.stride(2) * k_BKLD.itemsize, torch.get_num_threads()
    rows = FAR_ROWS if threads == 1 else BUSY_ROWS * threads
    is_long = q_BKMD.shape[2] >= rows and k_BKLD.shape[2] >= FAR_KEYS
    return is_long and key_stride >= FAR_BYTES and k_BKLD.shape[1] > 1


def _attend_by_head(
    q_BKMD: Tensor, k_BKLD: Tensor, v_BKLV: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Run the flash kernel on one key head after another, with dense copies of keys and values."""
    heads = zip(*(tensor.split(1, dim=1) for tensor in (q_BKMD, k_BKLD, v_BKLV)), strict=True)
    parts = [_flash(q, k.contiguous(), v.contiguous(), *options, **named) for q, k, v in heads]
    return torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=1)


def _keys(pool_SKD: Tensor, piece: slice | Tensor, num_units: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values of a job as [B, K, L, D]: a view of the pool if they are one run."""
    if isinstance(piece, slice):
        keys = pool_SKD[piece]
    else:
        # Some versions of torch cannot index 8-bit floats.
        bits = pool_SKD.view(torch.uint8) if pool_SKD.itemsize == 1 else pool_SKD
        keys = bits.index_select(0, piece).view(pool_SKD.dtype)
    keys = keys.to(dtype).view(num_units, -1, *pool_SKD.shape[1:])
    return keys.transpose(1, 2)


def _products(
    job: CpuJob, q_BKMD: Tensor, k_BKLD: Tensor, v_BKLV: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attend by matrix products, for softcaps and for values that are wider than keys."""
    num_units, kv_heads, m, _ = q_BKMD.shape
    num_keys, per_head = k_BKLD.shape[2], m // job.num_rows
    mask = job.mask
    if job.causal:
        ones = q_BKMD.new_full((job.num_rows, num_keys), -torch.inf)
        mask = ones.triu_(1)[None, None]
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat_interleave(per_head, dim=2)
    step = max(1, MAX_LOGITS // (num_units * kv_heads * num_keys))
    outs, lses = [], []
    for start in range(0, m, step):
        logits = torch.matmul(q_BKMD[:, :, start : start + step] * options.scale, k_BKLD.mT)
        if options.softcap is not None:
            logits = logits.div_(options.softcap).tanh_().mul_(options.softcap)
        if mask is not None:
            logits += mask[:, :, start : start + step] if mask.shape[2] > 1 else mask
        lse = logits.logsumexp(dim=-1)
        shift = lse.clamp(min=torch.finfo(lse.dtype).min)
        outs.append(torch.matmul(logits.sub_(shift[..., None]).exp_(), v_BKLV))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
