"""Masks of the tokens that a grammar allows.

Shape letters: P distributions, K masks, W words of 32 tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The tokens that may be drawn from P distributions."""

    bits_KW: Tensor
    """int32, one bit per token, the lowest bit first."""
    index_P: Tensor
    """int64, the mask of each distribution; -1 if all tokens are allowed."""

    def apply(self, logits_PV: Tensor) -> Tensor:
        """Return the logits [P, V], with minus infinity for tokens that are not allowed."""
        words_PW = self.bits_KW[self.index_P.clamp(min=0)]
        bit_32 = torch.arange(32, device=words_PW.device, dtype=words_PW.dtype)
        allowed_PV = ((words_PW[:, :, None] >> bit_32) & 1).flatten(1)[:, : logits_PV.shape[1]]
        barred_PV = (allowed_PV == 0) & (self.index_P >= 0)[:, None]
        return logits_PV.masked_fill(barred_PV, -torch.inf)
