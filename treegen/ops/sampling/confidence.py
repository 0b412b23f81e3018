"""How sure the model is at a token: numbers of its whole distribution, beside the draw.

Both are of the unchanged logits, before temperature and filters, as log-probabilities are.

Shape letters: P distributions, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.columns import slice_rows

CONFIDENCE, CERTAINTY = range(2)
_AT_ONCE = 2**25  # logits at most that are read in one go


@dataclass(frozen=True, slots=True)
class ConfidenceSignals:
    """What is told of each of P distributions.

    likeliest_P: of how many likeliest tokens the confidence is; 0 where a row has none.
    most: the largest of these.
    certainty: whether the self-certainty is told.
    """

    likeliest_P: Tensor
    most: int
    certainty: bool

    @staticmethod
    def of(params: Sequence[SamplingParams], index_P: Tensor) -> ConfidenceSignals | None:
        """What P rows ask for; row p has params[index_P[p]]. None where no row asks."""
        most = max(each.confidence for each in params)
        certainty = any(each.self_certainty for each in params)
        if not most and not certainty:
            return None
        likeliest = np.array([each.confidence for each in params], dtype=np.int64)
        return ConfidenceSignals(to_device(likeliest, index_P.device)[index_P], most, certainty)

    def read(self, logits_PV: Tensor, lse_P: Tensor) -> Tensor:
        """The confidence and the self-certainty of each row, float32 [P, 2]; 0 if not asked for.

        The confidence is minus the mean log-probability of the K likeliest tokens (Fu et al. 2025,
        "Deep Think with Confidence"). The self-certainty is the mean over the vocabulary of
        -log(V p), which is KL(uniform || p) (Kang et al. 2025). Tokens that the model cannot give,
        with a logit of minus infinity, are in neither mean.

        Args:
            logits_PV: Of any floating type.
            lse_P: Float32, their log-sum-exp.
        """
        most = max(_AT_ONCE // logits_PV.shape[1], 1)
        parts = []
        for start in range(0, max(len(logits_PV), 1), most):
            rows = slice(start, start + most)
            parts.append(slice_rows(self, rows)._read(logits_PV[rows].float(), lse_P[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, logits_PV: Tensor, lse_P: Tensor) -> Tensor:
        found_P2 = torch.zeros(len(logits_PV), 2, device=logits_PV.device)
        if self.most:
            top_PK = logits_PV.topk(min(self.most, logits_PV.shape[1]), dim=-1).values
            rank_K = torch.arange(top_PK.shape[1], device=top_PK.device)
            asked_PK = (rank_K < self.likeliest_P[:, None]) & top_PK.isfinite()
            mean_P = _mean(top_PK, asked_PK)
            asked_P = self.likeliest_P > 0
            found_P2[:, CONFIDENCE] = torch.where(asked_P, lse_P - mean_P, 0.0)
        if self.certainty:
            given_PV = logits_PV.isfinite()
            size_P = given_PV.sum(dim=-1).clamp(min=1)
            found_P2[:, CERTAINTY] = lse_P - _mean(logits_PV, given_PV) - size_P.log()
        return found_P2


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values of each row, [P]; 0 where none is.

    Summed in float64: rounding must not show how many rows there are.
    """
    total = torch.where(chosen, values, 0.0).sum(dim=-1, dtype=torch.float64)
    return (total / chosen.sum(dim=-1).clamp(min=1)).float()
