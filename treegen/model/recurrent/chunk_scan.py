"""Compute Mamba2 over texts in chunks of tokens, by matrix products instead of a step per token.

Within a chunk a token reads earlier ones as in attention, with decaying weights. Chunks pass states
to later ones. See section 6 of the Mamba-2 paper (https://arxiv.org/abs/2405.21060).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

# N sequences, L tokens of each, G groups, R heads of a group, K numbers of a group's key, V numbers
# of a head's input, B chunks, S tokens of a chunk

_CHUNK: Final = 128  # tokens per chunk
_WEIGHTS: Final = 2**28  # maximum bytes of the attention-like weights computed at once


def chunk_scan(
    x_NLGRV: Tensor,
    decay_NLGR: Tensor,
    keys_NLGK: Tensor,
    queries_NLGK: Tensor,
    state_NGKRV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what each token reads, and the states after the last token.

    A token turns a state S into exp(decay) S + key x', and then reads it with its query. All
    tensors are float32.

    Args:
        x_NLGRV: Inputs of heads [N, L, G, R, V], times the time steps of their tokens.
        decay_NLGR: Logarithms of the factors by which tokens decay a state [N, L, G, R]; at most 0.
        keys_NLGK: Keys of groups [N, L, G, K].
        queries_NLGK: Queries of groups [N, L, G, K].
        state_NGKRV: States before the first token [N, G, K, R, V].

    Returns:
        What each token reads [N, L, G, R, V], and the states after the last token [N, G, K, R, V].
    """
    num, length = x_NLGRV.shape[:2]
    size = min(_CHUNK, 1 << max(length - 1, 0).bit_length())
    heads = decay_NLGR.shape[2:].numel()
    part = max(_WEIGHTS // (8 * num * size * size * heads), 1) * size
    outs = []
    for at in range(0, length, part):
        x, decay, keys, queries = (
            tensor[:, at : at + part] for tensor in (x_NLGRV, decay_NLGR, keys_NLGK, queries_NLGK)
        )
        out, state_NGKRV = _chunks(x, decay, keys, queries, state_NGKRV, size)
        outs.append(out)
    return torch.cat(outs, 1), state_NGKRV


def _chunks(
    x_NLGRV: Tensor,
    decay_NLGR: Tensor,
    keys_NLGK: Tensor,
    queries_NLGK: Tensor,
    state_NGKRV: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    num, length, groups, heads, width = x_NLGRV.shape
    missing = -length % size  # tokens that change nothing

    def split_chunks(tensor: Tensor) -> Tensor:
        padded = pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
        parts: Tensor = padded.unflatten(1, (-1, size))
        return parts

    x_NBGSRV = split_chunks(x_NLGRV).transpose(2, 3)
    keys_NBGSK = split_chunks(keys_NLGK).transpose(2, 3)
    queries_NBGSK = split_chunks(queries_NLGK).transpose(2, 3)
    # Use float64, because differences of long sums may be much smaller than the sums.
    until_NBGRS = split_chunks(decay_NLGR).permute(0, 1, 3, 4, 2).double().cumsum(-1)
    between_NBGRSS = (until_NBGRS[..., :, None] - until_NBGRS[..., None, :]).float()
    is_later_SS = torch.ones(size, size, dtype=torch.bool, device=x_NLGRV.device).triu(1)
    weights_NBGRSS = between_NBGRSS.masked_fill_(is_later_SS, -torch.inf).exp_()
    weights_NBGRSS *= (queries_NBGSK @ keys_NBGSK.transpose(-1, -2))[:, :, :, None]
    own_NBGRSV = weights_NBGRSS @ x_NBGSRV.transpose(3, 4)

    rest_NBGSR = (until_NBGRS[..., -1:] - until_NBGRS).float().exp_().transpose(-1, -2)
    left_NBGSRV = x_NBGSRV * rest_NBGSR[..., None]
    made_NBGKRV = (keys_NBGSK.transpose(-1, -2) @ left_NBGSRV.flatten(-2)).unflatten(
        -1, (heads, width)
    )
    total_NBGR = until_NBGRS[..., -1].float().exp_()
    before_NBGKRV = torch.empty_like(made_NBGKRV)
    for chunk in range(made_NBGKRV.shape[1]):
        before_NBGKRV[:, chunk] = state_NGKRV
        state_NGKRV = state_NGKRV * total_NBGR[:, chunk, :, None, :, None] + made_NBGKRV[:, chunk]

    earlier_NBGSRV = (queries_NBGSK @ before_NBGKRV.flatten(-2)).unflatten(-1, (heads, width))
    earlier_NBGSRV *= until_NBGRS.float().exp_().transpose(-1, -2)[..., None]
    out_NBSGRV = (own_NBGRSV.transpose(3, 4) + earlier_NBGSRV).transpose(2, 3)
    return out_NBSGRV.reshape(num, -1, groups, heads, width)[:, :length], state_NGKRV
