"""Merge of attention over disjoint sets of keys into attention over their union.

Legend: P parts of the key set, T query rows, H heads, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treegen.errors import InputError


def merge(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint key sets, exactly, as one softmax.

    outs [P, T, H, V] and lses [P, T, H] (or sequences of P tensors), float32 or float64: round
    partial results to a shorter type only after the merge. The weights are the softmax of the LSEs
    over the parts. An empty part has LSE -inf and out zeros; whatever its out holds, even NaN, does
    not reach the result. Where all parts are empty the result is out 0, LSE -inf.
    """
    if len(outs) != len(lses) or len(outs) == 0:
        raise InputError(
            f"merge needs as many outs as lses, at least one, got {len(outs)} and {len(lses)}"
        )
    for out_THV, lse_TH in zip(outs, lses, strict=True):
        if out_THV.shape[:-1] != lse_TH.shape or lse_TH.shape != lses[0].shape:
            raise InputError(
                f"each out must have the shape of its lse and a last dimension, got "
                f"{tuple(out_THV.shape)} and {tuple(lse_TH.shape)}"
            )
        if out_THV.dtype not in (torch.float32, torch.float64):
            raise InputError(f"merge takes float32 or float64 partial results, got {out_THV.dtype}")
    lse_PTH = lses if isinstance(lses, Tensor) else torch.stack(tuple(lses))
    empty_PTH1 = (lse_PTH == -torch.inf)[..., None]
    finite = [out.masked_fill(empty, 0) for out, empty in zip(outs, empty_PTH1, strict=True)]
    return merge_in_place(finite, lse_PTH)


def merge_in_place(outs: Tensor | Sequence[Tensor], lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge as `merge` does, into outs[0]; the out of an empty part must be finite."""
    # The floor keeps -inf - -inf out of rows without any key: there all weights become 0.
    top_TH = lse_PTH.amax(dim=0).clamp_(min=torch.finfo(lse_PTH.dtype).min)
    weight_PTH = (lse_PTH - top_TH).exp_()
    sum_TH = weight_PTH.sum(dim=0)
    # A row with a key has a part of weight 1, so the floor acts on rows without any only.
    weight_PTH /= sum_TH.clamp(min=1.0)
    out_THV = outs[0].mul_(weight_PTH[0][..., None])
    for p in range(1, len(outs)):
        out_THV.addcmul_(outs[p], weight_PTH[p][..., None])
    return out_THV, sum_TH.log_().add_(top_TH)


def add_sinks(out_THV: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Put one more logit per head, that of no value, into the denominator."""
    total_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    share_TH = (lse_TH - total_TH.clamp(min=torch.finfo(lse_TH.dtype).min)).exp_()
    return out_THV.mul_(share_TH[..., None]), total_TH
