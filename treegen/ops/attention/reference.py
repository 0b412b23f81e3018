"""The specification of attention over levels: eager torch, one group at a time, any device.

Legend: T query rows of the batch, N rows of a group, L keys of a group, H query heads, K key/value
heads, R query heads per key head, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.merge import add_sinks, merge
from treegen.ops.attention.types import AttentionOptions, KVPair, KVPairs, PreparedLevels


class Reference:
    """The readable, slow implementation against which every other one is tested."""

    name = "reference"

    def refusal(self, device: torch.device) -> str | None:
        """Return None: this implementation runs on every device."""
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> tuple[HostLevel, ...]:
        """Return the levels unchanged.

        Args:
            levels: The levels, on the host.
            positions_T: Not used.
            device: Not used.
        """
        return tuple(levels)

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to each level separately, then merge.

        Args:
            q_THD: Queries [T, H, D].
            pairs: Keys and values of each level.
            prepared: The levels.
            options: Softmax options of the layer.

        Returns:
            Results [T, H, V] in the type of q, and LSE [T, H] in float32 (float64 for float64).
        """
        dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
        parts = [
            _attend_level(q_THD.to(dtype), pair, level, prepared.positions_T, options)
            for pair, level in zip(pairs, prepared.state, strict=True)
        ]
        out_THV, lse_TH = merge([out for out, _ in parts], [lse for _, lse in parts])
        if options.sinks_H is not None:
            out_THV, lse_TH = add_sinks(out_THV, lse_TH, options.sinks_H)
        return out_THV.to(q_THD.dtype), lse_TH


def _attend_level(
    q_THD: Tensor,
    pair: KVPair,
    level: HostLevel,
    positions_T: Tensor | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    keys, values = pair
    page_size = keys.shape[1]
    out_THV = q_THD.new_zeros(*q_THD.shape[:2], values.shape[-1])
    lse_TH = q_THD.new_full(q_THD.shape[:2], -torch.inf)
    for g in range(level.start_G.size):
        start, stop = int(level.start_G[g]), int(level.stop_G[g])
        kv_len, kv_start = int(level.kv_len_G[g]), int(level.kv_start_G[g])
        if start == stop or kv_len == 0:
            continue
        pages_P = torch.as_tensor(level.pages_GP[g, : -(-kv_len // page_size)], device=keys.device)
        k_LKD = keys[pages_P].flatten(0, 1)[:kv_len].to(q_THD.dtype)
        v_LKV = values[pages_P].flatten(0, 1)[:kv_len].to(q_THD.dtype)
        hidden_NL = None
        if positions_T is not None and (level.causal or options.window is not None):
            position_N1 = positions_T[start:stop, None].long()
            key_1L = torch.arange(kv_start, kv_start + kv_len, device=q_THD.device)[None, :]
            hidden_NL = torch.zeros(stop - start, kv_len, dtype=torch.bool, device=q_THD.device)
            if level.causal:
                hidden_NL |= key_1L > position_N1
            if options.window is not None:
                hidden_NL |= key_1L < options.window.start(position_N1)
        out, lse = _attend_group(q_THD[start:stop], k_LKD, v_LKV, hidden_NL, options)
        out_THV[start:stop] = out
        lse_TH[start:stop] = lse
    return out_THV, lse_TH


def _attend_group(
    q_NHD: Tensor, k_LKD: Tensor, v_LKV: Tensor, hidden_NL: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute one softmax over the keys of one group; returns out [N, H, V] and LSE [N, H]."""
    kv_heads = k_LKD.shape[1]
    q_NKRD = q_NHD.unflatten(1, (kv_heads, -1))
    logits_KRNL = torch.einsum("nkrd,lkd->krnl", q_NKRD, k_LKD) * options.scale
    if options.softcap is not None:
        logits_KRNL = options.softcap * torch.tanh(logits_KRNL / options.softcap)
    if hidden_NL is not None:
        logits_KRNL = logits_KRNL.masked_fill(hidden_NL, -torch.inf)
    lse_KRN = logits_KRNL.logsumexp(dim=-1)
    # A row that sees no key has LSE -inf; the floor makes its weights 0 instead of NaN.
    floor_KRN = lse_KRN.clamp(min=torch.finfo(lse_KRN.dtype).min)
    weight_KRNL = (logits_KRNL - floor_KRN[..., None]).exp()
    out_NKRV = torch.einsum("krnl,lkv->nkrv", weight_KRNL, v_LKV)
    return out_NKRV.flatten(1, 2), lse_KRN.permute(2, 0, 1).flatten(1, 2)
