"""Which tokens may be drawn, where a grammar says so.

Shape letters: P distributions, K masks, W words of 32 tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The tokens that P distributions may give.

    bits_KW: int32, a bit for each token, the lowest first.
    index_P: int64, the mask of each distribution; -1 for one that may give all.
    """

    bits_KW: Tensor
    index_P: Tensor

    def apply(self, logits_PV: Tensor) -> Tensor:
        """The logits, minus infinity for all other tokens."""
        words_PW = self.bits_KW[self.index_P.clamp(min=0)]
        bit_32 = torch.arange(32, device=words_PW.device, dtype=words_PW.dtype)
        allowed_PV = ((words_PW[:, :, None] >> bit_32) & 1).flatten(1)[:, : logits_PV.shape[1]]
        barred_PV = (allowed_PV == 0) & (self.index_P >= 0)[:, None]
        return logits_PV.masked_fill(barred_PV, -torch.inf)
