"""Merging of attention over disjoint sets of keys into attention over all of them.

Legend: P parts of the key set, T query rows, H heads, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treegen.common.checks import check_argument_types
from treegen.errors import InputError


@check_argument_types
def merge(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into one exact softmax over all keys.

    The weights of the parts are the softmax of their LSEs. Partial results are float32 or float64:
    they may be rounded to a shorter type after the merge, not before.

    Args:
        outs: Partial results [P, T, H, V], or a sequence of P tensors [T, H, V].
        lses: [P, T, H], likewise; -inf where a row sees no key of a part. The values of `outs`
            there, even NaN, do not affect the result.

    Returns:
        Results [T, H, V] and LSE [T, H]. A row that sees no key has the result 0 and the LSE -inf.

    Raises:
        InputError: shapes do not fit each other, or a type is neither float32 nor float64.
    """
    if len(outs) != len(lses) or len(outs) == 0:
        raise InputError(
            "merge requires the same number of outs and lses, and at least one of each, got "
            f"{len(outs)} and {len(lses)}"
        )
    for out_THV, lse_TH in zip(outs, lses, strict=True):
        if out_THV.shape[:-1] != lse_TH.shape or lse_TH.shape != lses[0].shape:
            raise InputError(
                "each tensor in outs must have the shape of its lse plus one last dimension, "
                f"and all lses must have the same shape, got {tuple(out_THV.shape)} and "
                f"{tuple(lse_TH.shape)}"
            )
        if out_THV.dtype not in (torch.float32, torch.float64):
            raise InputError(f"partial results must be float32 or float64, got {out_THV.dtype}")
    lse_PTH = lses if isinstance(lses, Tensor) else torch.stack(tuple(lses))
    empty_PTH1 = (lse_PTH == -torch.inf)[..., None]
    finite = [out.masked_fill(empty, 0) for out, empty in zip(outs, empty_PTH1, strict=True)]
    return merge_in_place(finite, lse_PTH)


def merge_in_place(outs: Tensor | Sequence[Tensor], lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge like `merge`, but write the result into outs[0].

    Args:
        outs: Partial results [P, T, H, V], or a sequence of P tensors [T, H, V]; finite even where
            a row sees no key of a part.
        lse_PTH: [P, T, H]; -inf where a row sees no key of a part.

    Returns:
        Results [T, H, V], which are outs[0], and LSE [T, H].
    """
    # In a row without any key the floor replaces -inf, so that all weights become 0.
    top_TH = lse_PTH.amax(dim=0).clamp_(min=torch.finfo(lse_PTH.dtype).min)
    weight_PTH = (lse_PTH - top_TH).exp_()
    sum_TH = weight_PTH.sum(dim=0)
    # A row with a key has a part of weight 1, so the floor affects only rows without a key.
    weight_PTH /= sum_TH.clamp(min=1.0)
    out_THV = outs[0].mul_(weight_PTH[0][..., None])
    for p in range(1, len(outs)):
        out_THV.addcmul_(outs[p], weight_PTH[p][..., None])
    return out_THV, sum_TH.log_().add_(top_TH)


def add_sinks(out_THV: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sink of each head to the denominator of its softmax. A sink has no value vector.

    Args:
        out_THV: Results [T, H, V], changed in place.
        lse_TH: LSE of the results [T, H].
        sinks_H: Logit of each head's sink [H].

    Returns:
        The results [T, H, V], and the LSE [T, H] with the sinks.
    """
    total_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    share_TH = (lse_TH - total_TH.clamp(min=torch.finfo(lse_TH.dtype).min)).exp_()
    return out_THV.mul_(share_TH[..., None]), total_TH
