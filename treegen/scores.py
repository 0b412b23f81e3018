"""Log-probabilities of given tokens, gathered while their segments are prefilled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treegen.layout import Ints
from treegen.plan import Plan
from treegen.results import Score


class TokenScores:
    """Per segment: the log-probability of each scored token, and whether it is the likeliest."""

    def __init__(self, plan: Plan, children: list[list[int]]) -> None:
        """`children`: indices of the segments that continue each segment."""
        self._plan, self._children = plan, children
        self._logprobs = [np.full(len(s.tokens), np.nan, np.float32) for s in plan.segments]
        self._is_best = [np.zeros(len(s.tokens), np.bool_) for s in plan.segments]

    def add(self, segment: int, positions: Ints, logits_SV: Tensor, lse_S: Tensor) -> None:
        """Score the tokens that follow some positions of a segment, given the logits there.

        After the segment's last position come the first tokens of all its children.
        """
        next_index = positions - self._plan.segments[segment].start + 1
        inside = next_index < len(self._logprobs[segment])
        targets = [(segment, np.flatnonzero(inside), next_index[inside])]
        if not inside.all():
            last, first = np.array([len(positions) - 1]), np.zeros(1, dtype=np.int64)
            targets += [(child, last, first) for child in self._children[segment]]
        best_S = logits_SV.argmax(dim=-1)
        for index, rows, at in targets:
            tokens = self._plan.segments[index].tokens[at].astype(np.int64)
            token = torch.from_numpy(tokens).to(logits_SV.device)
            row = torch.from_numpy(rows).to(logits_SV.device)
            self._logprobs[index][at] = (logits_SV[row, token] - lse_S[row]).cpu().numpy()
            self._is_best[index][at] = (best_S[row] == token).cpu().numpy()

    def of(self, request: int) -> Score:
        """The score of one request's tokens from its `score_from` on."""
        path = [segment.index for segment in self._plan.path(request)][::-1]
        spec = self._plan.requests[request]
        logprobs = np.concatenate([self._logprobs[index] for index in path])[spec.score_from :]
        is_best = np.concatenate([self._is_best[index] for index in path])[spec.score_from :]
        tokens = spec.tokens[spec.score_from :]
        return Score(tuple(tokens.tolist()), tuple(logprobs.tolist()), bool(is_best.all()))
