"""Attention over levels of latents (multi-head latent attention).

A latent is one key for all heads, and its first numbers are the value: queries are multiplied by
what would make keys of latents, and results by what makes values of them. So a row's heads are the
rows of one product, and keys are read once for all of them.

Legend: T query rows, H heads, N numbers of a head's key that are made of a latent, V numbers of a
head's value, R rank, P rotated numbers, K = N + P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treegen.attention.api import attend
from treegen.attention.types import Prepared
from treegen.spec import LatentSpec


def attend_latents(
    q_THK: Tensor,
    pool: Tensor,
    up_HXR: Tensor,
    form: LatentSpec,
    levels: Prepared,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query row to the latents of its groups, over all levels, in one softmax.

    q_THK: queries; the last P numbers are rotated.
    pool: latents and the rotated numbers behind them, [num_pages, page_size, 1, R + P].
    up_HXR: what makes keys and values of a latent; X is N + V.
    scale: what logits are multiplied by.
    levels, window, softcap, sinks: as in `treegen.attention.attend`.

    Returns out [T, H, V] in the type of q.

    Raises:
        InputError: the implementation does not take heads of this width.
    """
    up_HNR, up_HVR = up_HXR.split([form.nope, form.v_dim], 1)
    q_HTN, q_HTP = q_THK.transpose(0, 1).split([form.nope, form.rope], -1)
    absorbed_THR = torch.bmm(q_HTN, up_HNR).transpose(0, 1)
    q_THD = torch.cat([absorbed_THR, q_HTP.transpose(0, 1)], -1)
    out_THR = attend(
        q_THD, pool, pool[..., : form.rank], levels,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return torch.bmm(out_THR.transpose(0, 1), up_HVR.mT).transpose(0, 1)
