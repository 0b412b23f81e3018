"""Log-probabilities of prompt tokens, collected while their segments are prefilled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import AsyncHostCopy, to_device
from treegen.common.outputs import Score, TopLogprobs
from treegen.engine.compute.levels import Ints
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.ops.sampling.logits import argmax_tokens, topk_logits


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of some tokens of a segment, being copied to the host."""

    segment: LiveSegment
    """The segment."""
    at: Ints
    """Indices of the tokens in the segment, [N]."""
    fetch: AsyncHostCopy
    """Their log-probabilities [N], and whether each is the most likely token [N].

    If requested, also the K most likely tokens at each place, and their log-probabilities [N, K].
    """

    def add(self) -> None:
        """Wait for the scores and store them in the segment."""
        target = self.segment
        if target.logprobs is None or target.is_best is None:
            target.logprobs = np.full(len(target.tokens), np.nan, np.float32)
            target.is_best = np.zeros(len(target.tokens), np.bool_)
        target.logprobs[self.at], target.is_best[self.at], *top = self.fetch.wait()
        if top:
            shape = len(target.tokens), top[0].shape[1]
            if target.most_likely is None:
                target.most_likely = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            for stored, new in zip(target.most_likely, top, strict=True):
                stored[self.at] = new


def score_after(
    segment: LiveSegment, positions: Ints, logits_SV: Tensor, lse_S: Tensor
) -> list[PendingScores]:
    """Score the tokens that follow some positions of a segment.

    The first tokens of all its children follow the segment's last position.

    Args:
        segment: The segment.
        positions: Positions in ascending order, [S].
        logits_SV: The logits at these positions, [S, vocabulary].
        lse_S: Log-sum-exp of these logits, [S].
    """
    next_index = positions - segment.start + 1
    num_inside = int(np.count_nonzero(next_index < len(segment.tokens)))
    targets = [(segment, slice(num_inside), next_index[:num_inside])]
    if num_inside < len(positions):
        last, first = slice(len(positions) - 1, None), np.zeros(1, dtype=np.int64)
        below = segment.children.values()
        targets += [(child, last, first) for child in below if child.scored < child.start]
    best_S = argmax_tokens(logits_SV)
    scored = []
    for target, rows, at in targets:
        token_N = to_device(target.tokens[at].astype(np.int64), logits_SV.device)
        logits_NV, lse_N = logits_SV[rows], lse_S[rows]
        results = [logits_NV.gather(1, token_N[:, None])[:, 0] - lse_N, best_S[rows] == token_N]
        if target.top:
            logit_NK, token_NK = topk_logits(logits_NV, min(target.top, logits_SV.shape[1]))
            results += [token_NK.int(), logit_NK - lse_N[:, None]]
        scored.append(PendingScores(target, at, AsyncHostCopy(results)))
    return scored


def collect_score(request: LiveRequest) -> Score:
    """Return the score of a request's tokens from `score_from` on, all of which are computed."""
    assert request.spec.score_from is not None
    path = []
    for segment in request.segment.path():
        path.append(segment)
        if segment.start <= request.spec.score_from:
            break
    path.reverse()
    skip = request.spec.score_from - path[0].start

    def concat_scored(arrays: Iterable[NDArray[Any] | None]) -> NDArray[Any]:
        """Copy the scored parts, so that no score keeps the numbers of a whole prompt alive."""
        first, *later = [array for array in arrays if array is not None]
        return np.concatenate([first[skip:], *later])

    num, most_likely = request.spec.top, [s.most_likely for s in path if s.most_likely is not None]
    top = [concat_scored(arrays[i][:, :num] for arrays in most_likely) for i in range(2) if num]
    return Score(
        tuple(concat_scored(s.tokens for s in path).tolist()),
        tuple(concat_scored(s.logprobs for s in path).tolist()),
        bool(concat_scored(s.is_best for s in path).all()),
        TopLogprobs(*top) if top else None,
    )
