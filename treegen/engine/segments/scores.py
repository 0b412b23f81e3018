"""Log-probabilities of prompt tokens, collected while their segments are prefilled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import AsyncHostCopy, to_device_together
from treegen.common.outputs import Score, TopLogprobs
from treegen.engine.compute.levels import Ints
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.ops.sampling.logits import argmax_tokens, log_sum_exp, topk_logits

_CHUNK: Final = 2**26
"""Maximum number of logits that are in memory as float32 at once."""


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """Tokens of a segment, and where a pass has the logits that predict them."""

    segment: LiveSegment
    """The segment."""
    at: Ints
    """Indices of the tokens in the segment, ascending, [N]."""
    rows: Ints
    """Row of the pass's logits for each token, ascending, [N]."""


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of some tokens of a segment, being copied to the host."""

    tokens: TokensToScore
    """The tokens."""
    fetches: Sequence[tuple[AsyncHostCopy, slice]]
    """Copies that contain the scores, and where the scores are in each copy.

    A copy has log-probabilities, and whether each token is the most likely one. If requested, it
    also has the K most likely tokens at each position, and their log-probabilities [.., K].
    """

    def add(self) -> None:
        """Wait for the scores and store them in the segment."""
        target, at = self.tokens.segment, self.tokens.at
        if target.logprobs is None or target.is_best is None:
            target.logprobs = np.full(len(target.tokens), np.nan, np.float32)
            target.is_best = np.zeros(len(target.tokens), np.bool_)
        parts = [[array[part] for array in fetch.wait()] for fetch, part in self.fetches]
        arrays = [np.concatenate(part) for part in zip(*parts, strict=True)]
        target.logprobs[at], target.is_best[at], *top = arrays
        if top:
            shape = len(target.tokens), top[0].shape[1]
            if target.most_likely is None:
                target.most_likely = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            for stored, new in zip(target.most_likely, top, strict=True):
                stored[at] = new


def tokens_to_score(
    segment: LiveSegment, positions: Ints, first_row: int
) -> Iterator[TokensToScore]:
    """Yield the tokens that follow some positions of a segment, by their segment.

    The first tokens of all its children follow the segment's last position.

    Args:
        segment: The segment.
        positions: Positions in ascending order, at least one, [S].
        first_row: Row of the pass's logits after the first position; the others follow.
    """
    next_index = positions - segment.start + 1
    num_inside = int(np.count_nonzero(next_index < len(segment.tokens)))
    if num_inside:
        rows = np.arange(first_row, first_row + num_inside)
        yield TokensToScore(segment, next_index[:num_inside], rows)
    if num_inside < len(positions):
        first, last_row = np.zeros(1, dtype=np.int64), np.array([first_row + len(positions) - 1])
        for child in segment.children.values():
            if child.scored < child.start:
                yield TokensToScore(child, first, last_row)


def score_tokens(
    targets: Sequence[TokensToScore], logits_SV: Tensor
) -> tuple[AsyncHostCopy, list[PendingScores]]:
    """Score tokens by the logits of a pass, some rows of logits at a time.

    Args:
        targets: The tokens.
        logits_SV: The logits of the pass, [S, vocabulary].

    Returns:
        Log-sum-exp of each row of the logits, [S], and the scores of each target's tokens.
    """
    num_rows = max(_CHUNK // logits_SV.shape[1], 1)
    lse_parts: list[Tensor] = []
    fetches: list[list[tuple[AsyncHostCopy, slice]]] = [[] for _ in targets]
    for low in range(0, max(len(logits_SV), 1), num_rows):
        logits_PV = logits_SV[low : low + num_rows].float()
        lse_P = log_sum_exp(logits_PV)
        lse_parts.append(lse_P)
        bounds = [np.searchsorted(target.rows, (low, low + num_rows)) for target in targets]
        by_top: dict[int, list[int]] = {}
        for index, (first, stop) in enumerate(bounds):
            if first < stop:
                by_top.setdefault(targets[index].segment.top, []).append(index)
        for top, indices in by_top.items():
            parts = [(targets[index], slice(*bounds[index])) for index in indices]
            rows_N = np.concatenate([target.rows[part] for target, part in parts]) - low
            tokens_N = np.concatenate([t.segment.tokens[t.at[part]] for t, part in parts])
            fetch = AsyncHostCopy(_score_rows(logits_PV, lse_P, rows_N, tokens_N, top))
            begin = 0
            for index, (_, part) in zip(indices, parts, strict=True):
                end = begin + part.stop - part.start
                fetches[index].append((fetch, slice(begin, end)))
                begin = end
    pending = [*map(PendingScores, targets, fetches)]
    return AsyncHostCopy([torch.cat(lse_parts)]), pending


def _score_rows(
    logits_PV: Tensor, lse_P: Tensor, rows_N: Ints, tokens_N: NDArray[Any], top: int
) -> list[Tensor]:
    """Return the tensors that `PendingScores.fetches` copies, for tokens after some rows of logits.

    Args:
        logits_PV: Logits, float32.
        lse_P: Their log-sum-exp.
        rows_N: Row of each token; rows may repeat.
        tokens_N: The tokens.
        top: Number of most likely tokens to return for each token.
    """
    used_R, index_N = np.unique(rows_N, return_inverse=True)
    row_R, at_N, token_N = to_device_together(
        [used_R, index_N, tokens_N.astype(np.int64)], logits_PV.device
    )
    if used_R[-1] - used_R[0] + 1 == len(used_R):  # no copy
        logits_RV = logits_PV[int(used_R[0]) : int(used_R[-1]) + 1]
    else:
        logits_RV = logits_PV[row_R]
    lse_N = lse_P[row_R][at_N]
    results = [logits_RV[at_N, token_N] - lse_N, argmax_tokens(logits_RV)[at_N] == token_N]
    if top:
        logit_RK, token_RK = topk_logits(logits_RV, min(top, logits_RV.shape[1]))
        results += [token_RK.int()[at_N], logit_RK[at_N] - lse_N[:, None]]
    return results


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
