"""Confidence signals: how certain the model is at a token, from its whole distribution.

Both signals use the unchanged logits, before temperature and filters, as log-probabilities do.

Shape letters: P distributions, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.logits import slice_rows

CONFIDENCE, CERTAINTY = range(2)
_MAX_LOGITS = 2**25  # largest number of logits that are read at once


@dataclass(frozen=True, slots=True)
class ConfidenceSignals:
    """The confidence signals that are reported for P distributions."""

    most_likely_P: Tensor
    """Number of most likely tokens in the confidence; 0 for a row that does not report it."""
    max_most_likely: int
    """The largest number in `most_likely_P`."""
    certainty: bool
    """Whether the self-certainty is reported."""

    @staticmethod
    def of(params: Sequence[SamplingParams], index_P: Tensor) -> ConfidenceSignals | None:
        """Return the signals of P rows, where row p has params[index_P[p]]; None if all are off."""
        max_most_likely = max(p.confidence for p in params)
        certainty = any(p.self_certainty for p in params)
        if not max_most_likely and not certainty:
            return None
        most_likely = np.array([p.confidence for p in params], dtype=np.int64)
        return ConfidenceSignals(
            to_device(most_likely, index_P.device)[index_P], max_most_likely, certainty
        )

    def read(self, logits_PV: Tensor, lse_P: Tensor) -> Tensor:
        """Return the confidence and self-certainty of each row, float32 [P, 2]; 0 if not reported.

        The confidence is minus the mean log-probability of the K most likely tokens (Fu et al.
        2025, "Deep Think with Confidence"). The self-certainty is the mean over the vocabulary of
        -log(V p), which is KL(uniform || p) (Kang et al. 2025). Tokens that the model cannot give,
        with a logit of minus infinity, are in neither mean.

        Args:
            logits_PV: Logits [P, V] of any floating type.
            lse_P: Their log-sum-exp, float32 [P].
        """
        max_rows = max(_MAX_LOGITS // logits_PV.shape[1], 1)
        parts = []
        for start in range(0, max(len(logits_PV), 1), max_rows):
            rows = slice(start, start + max_rows)
            parts.append(slice_rows(self, rows)._read(logits_PV[rows].float(), lse_P[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, logits_PV: Tensor, lse_P: Tensor) -> Tensor:
        signals_P2 = torch.zeros(len(logits_PV), 2, device=logits_PV.device)
        if self.max_most_likely:
            top_PK = logits_PV.topk(min(self.max_most_likely, logits_PV.shape[1]), dim=-1).values
            rank_K = torch.arange(top_PK.shape[1], device=top_PK.device)
            counted_PK = (rank_K < self.most_likely_P[:, None]) & top_PK.isfinite()
            mean_P = _mean(top_PK, counted_PK)
            reports_P = self.most_likely_P > 0
            signals_P2[:, CONFIDENCE] = torch.where(reports_P, lse_P - mean_P, 0.0)
        if self.certainty:
            finite_PV = logits_PV.isfinite()
            size_P = finite_PV.sum(dim=-1).clamp(min=1)
            signals_P2[:, CERTAINTY] = lse_P - _mean(logits_PV, finite_PV) - size_P.log()
        return signals_P2


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen values of each row [P]; 0 if none is chosen.

    Sums are float64, so that results do not depend on the number of rows through rounding.
    """
    total = torch.where(chosen, values, 0.0).sum(dim=-1, dtype=torch.float64)
    return (total / chosen.sum(dim=-1).clamp(min=1)).float()
