"""Token draws from logits, with randomness that belongs to the row, not to the batch.

A draw is a pure function of the row's seed, the step and the logits and, with penalties, of the
row's text: a counter-based generator turns seed and step into a uniform number, which is looked up
in the row's cumulative distribution. So a sample uses the same numbers in any batch, in any order,
and after any preemption or resume. The sample is the same if its logits are, but a model may round
logits differently in another batch.

Shape letters: P distributions, N draws from each, V vocabulary, W one GPU's part of it, B blocks of
it, K most likely tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import AsyncHostCopy
from treegen.ops.kernel_modules import import_kernels
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.logits import Masks, argmax_tokens, log_sum_exp, slice_rows
from treegen.ops.sampling.token_history import TokenHistory

# Constants of SplitMix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def uniforms(seeds: Tensor, steps: Tensor) -> Tensor:
    """Return uniform float64 numbers in [0, 1), one for each seed and step.

    Args:
        seeds: Seeds, int64 of any shape. The result has the same shape.
        steps: Steps, int64 of the same shape.
    """
    # int64 arithmetic wraps around. The masks turn arithmetic shifts into logical ones.
    z = seeds + (steps + 1) * _GAMMA
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX2
    z = z ^ ((z >> 31) & (2**33 - 1))
    return ((z >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


_BLOCK = 64  # tokens of the vocabulary in one block of the cumulative distribution
_MAX_LOGITS = 2**24  # largest number of logits that `_draw` gets in one call


@dataclass(frozen=True, slots=True)
class Draws:
    """N tokens drawn from each of P distributions."""

    tokens_PN: Tensor
    """int64, the tokens."""
    logprobs_PN: Tensor
    """float32, the natural logarithms of their probabilities, under the unchanged logits or, in
    rows of `SamplingBatch.processed_P`, under the distribution that they are drawn from."""
    lse_P: Tensor
    """float32, log-sum-exp of the logits; not finite if some logit is NaN."""
    top_tokens_PK: Tensor | None
    """The most likely tokens; None if they are not reported."""
    top_logprobs_PK: Tensor | None
    """The log-probabilities of the most likely tokens; None if they are not reported."""
    signals_P2: Tensor | None = None
    """float32, the confidence and the self-certainty; None if neither is reported."""

    def first(self, num: int) -> Draws:
        """Return the draws of the first `num` distributions."""
        tensors = (getattr(self, field.name) for field in fields(self))
        parts: list[Any] = [None if tensor is None else tensor[:num] for tensor in tensors]
        return Draws(*parts)


def draw(
    logits_PV: Tensor,
    seeds_PN: Tensor,
    steps_PN: Tensor,
    params: SamplingBatch,
    forced_P: Tensor | None = None,
    texts: TokenHistory | None = None,
    masks: Masks | None = None,
) -> Draws:
    """Draw N tokens from each of P rows of logits, computing in float32 for any type of logits.

    Args:
        logits_PV: Logits [P, V] of any floating type.
        seeds_PN: Seed of each draw, int64 [P, N].
        steps_PN: Number of tokens drawn before each draw, int64 [P, N]. All draws of a biased row
            have the same number.
        params: Sampling parameters of the rows.
        forced_P: The token that a row gets instead of its draws, or -1, int64 [P]; None if all
            tokens are drawn.
        texts: The text before the draws. Required with penalties.
        masks: The tokens that may be drawn; None for all.
    """
    kernels = None
    if logits_PV.device.type == "cuda" and seeds_PN.shape[1] and params.draws_in_blocks:
        kernels = import_kernels("treegen.ops.sampling.kernels")
    if kernels is not None:
        tokens_PN, logprobs_PN, lse_P = kernels.draw_blocks(
            logits_PV,
            seeds_PN.contiguous(),
            steps_PN.contiguous(),
            params.temperature_P,
            params.greedy_P,
            forced_P,
            masks=masks,
        )
        signals_P2 = None if params.signals is None else params.signals.read(logits_PV, lse_P)
        return Draws(tokens_PN, logprobs_PN, lse_P, None, None, signals_P2)
    # Sorting, summing and searching logits takes ten to twenty times their memory.
    width = max(logits_PV.shape[1], texts.longest if texts is not None else 0)
    max_rows = max(_MAX_LOGITS // width, 1)
    inputs = logits_PV, seeds_PN, steps_PN, params, forced_P, texts, masks
    if len(logits_PV) <= max_rows:
        return _draw(*inputs)
    parts = [
        _draw(*(_slice(value, slice(start, start + max_rows)) for value in inputs))
        for start in range(0, len(logits_PV), max_rows)
    ]
    return _concat_draws(parts)


def _slice(value: Any, rows: slice) -> Any:
    """Return some rows of a tensor or a dataclass; None for None."""
    if value is None:
        return None
    return value[rows] if isinstance(value, Tensor) else slice_rows(value, rows)


def can_divide(device: torch.device) -> bool:
    """Return whether `draw_vocab_parallel` runs on a device.

    It runs on GPUs, and on any device in Triton's interpreter.
    """
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def draw_vocab_parallel(
    logits_PW: Tensor,
    seeds_PN: Tensor,
    steps_PN: Tensor,
    params: SamplingBatch,
    forced_P: Tensor | None,
    part: tuple[int, int, int],
    gather: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
) -> Draws:
    """Draw like `draw`, with plain parameters, if each of several GPUs has a part of the logits.

    All GPUs get the draws. They exchange sums of blocks, not logits.

    Args:
        logits_PW: This GPU's part of the logits [P, W].
        seeds_PN: Seed of each draw, int64 [P, N].
        steps_PN: Number of tokens drawn before each draw, int64 [P, N].
        params: Sampling parameters of the rows.
        forced_P: The token that a row gets instead of its draws, or -1, int64 [P]; None if all
            tokens are drawn.
        part: This GPU's rank, its first token, and the number of real logits among the W.
        gather: Concatenates the tensors of all GPUs along the last dimension, dense.
        total: Sums the tensors of all GPUs.
    """
    from treegen.ops.sampling import kernels  # requires Triton

    tokens_PN, logprobs_PN, lse_P = kernels.draw_blocks(
        logits_PW,
        seeds_PN.contiguous(),
        steps_PN.contiguous(),
        params.temperature_P,
        params.greedy_P,
        forced_P,
        part=kernels.VocabPart(*part),
        gather=gather,
        total=total,
    )
    return Draws(tokens_PN, logprobs_PN, lse_P, None, None)


def _concat_draws(parts: list[Draws]) -> Draws:
    def column(name: str) -> Any:
        pieces = [getattr(part, name) for part in parts]
        return None if pieces[0] is None else torch.cat(pieces)

    return Draws(*(column(field.name) for field in fields(Draws)))


def _draw(
    logits_PV: Tensor,
    seeds_PN: Tensor,
    steps_PN: Tensor,
    params: SamplingBatch,
    forced_P: Tensor | None,
    texts: TokenHistory | None,
    masks: Masks | None,
) -> Draws:
    logits_PV = logits_PV.float()
    lse_P = log_sum_exp(logits_PV)
    biased_PV = logits_PV if masks is None else masks.apply(logits_PV)
    if params.biases is not None:
        biased_PV = params.biases.add(biased_PV, steps_PN[:, 0])
    if params.penalties is not None:
        assert texts is not None, "penalties need the text"
        biased_PV = params.penalties.apply(biased_PV, texts)
    if params.all_greedy:
        tokens_PN = argmax_tokens(biased_PV)[:, None].expand_as(seeds_PN)
    else:
        tokens_PN = _inverse_cdf(_weights(biased_PV, params), uniforms(seeds_PN, steps_PN))
        if params.greedy_P is not None:
            best_P1 = argmax_tokens(biased_PV)[:, None]
            tokens_PN = torch.where(params.greedy_P[:, None], best_P1, tokens_PN)
    if forced_P is not None:
        tokens_PN = torch.where(forced_P[:, None] >= 0, forced_P[:, None], tokens_PN)
    reported_PV, reported_lse_P = logits_PV, lse_P
    if params.processed_P is not None:
        drawn_PV = _weights(biased_PV, params).log()
        # A forced token is not drawn: its log-probability is the model's.
        processed_P = (
            params.processed_P if forced_P is None else params.processed_P & (forced_P < 0)
        )
        reported_PV = torch.where(processed_P[:, None], drawn_PV, logits_PV)
        reported_lse_P = log_sum_exp(reported_PV)
    logprobs_PN = reported_PV.gather(1, tokens_PN) - reported_lse_P[:, None]
    top_tokens = top_logprobs = None
    if params.num_logprobs:
        top = reported_PV.topk(min(params.num_logprobs, logits_PV.shape[-1]), dim=-1)
        top_tokens, top_logprobs = top.indices, top.values - reported_lse_P[:, None]
    signals_P2 = None if params.signals is None else params.signals.read(logits_PV, lse_P)
    return Draws(tokens_PN, logprobs_PN, lse_P, top_tokens, top_logprobs, signals_P2)


def _inverse_cdf(weights_PV: Tensor, uniform_PN: Tensor) -> Tensor:
    """Return, for each draw, the first token whose cumulative weight passes its share of the total.

    The block of the vocabulary is found first, then the token in that block, so only one block is
    summed token by token. Sums are float64: rounding must not move a boundary between two tokens.
    """
    num_rows, size = weights_PV.shape
    if size <= 2 * _BLOCK:
        return _search(weights_PV.cumsum(dim=-1, dtype=torch.float64), uniform_PN)
    if size % _BLOCK:
        weights_PV = torch.nn.functional.pad(weights_PV, (0, -size % _BLOCK))
    blocks_PBW = weights_PV.view(num_rows, -1, _BLOCK)
    sums_PB = blocks_PBW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_PN = uniform_PN * sums_PB[:, -1:]
    block_PN = _search(sums_PB, uniform_PN)
    before_PN = torch.where(block_PN > 0, sums_PB.gather(1, (block_PN - 1).clamp(min=0)), 0.0)
    row_P1 = torch.arange(num_rows, device=weights_PV.device)[:, None]
    cdf_PNW = blocks_PBW[row_P1, block_PN].cumsum(dim=-1, dtype=torch.float64)
    share_PN1 = ((target_PN - before_PN) / cdf_PNW[..., -1])[..., None]
    return block_PN * _BLOCK + _search(cdf_PNW, share_PN1)[..., 0]


def _search(cdf: Tensor, share: Tensor) -> Tensor:
    """Return the index of the first cumulative weight that exceeds a share of the last one.

    The entry at this index has a positive weight, because its cumulative weight exceeds the
    previous one.
    """
    # In float64 too, a share below 1 times the total is below the total.
    target = share.clamp(min=0.0, max=1 - 2.0**-53) * cdf[..., -1:]
    # The caller rejects NaN weights. Here they must not lead to an index outside the table.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)


def _weights(logits_PV: Tensor, params: SamplingBatch) -> Tensor:
    """Return unnormalized weights of tokens after temperature, min_p, top_k and top_p.

    A token that is filtered out has weight 0.
    """
    # In place: on a CPU new memory for each step would cost more than computing it.
    weights = logits_PV / params.temperature_P[:, None]
    weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    if params.min_p_P is not None:
        floor_P1 = weights.amax(dim=-1, keepdim=True) * params.min_p_P[:, None]
        weights = weights.masked_fill(weights < floor_P1, 0.0)
    if params.top_k_P is None and params.top_p_P is None:
        return weights
    # A stable sort, so that equal weights are kept by vocabulary order, not by batch.
    sorted_PV, order_PV = weights.sort(dim=-1, descending=True, stable=True)
    if params.top_k_P is not None:
        size = logits_PV.shape[-1]
        limit_P1 = torch.where(params.top_k_P > 0, params.top_k_P, size)[:, None]
        rank_V = torch.arange(size, device=weights.device)
        sorted_PV = sorted_PV.masked_fill(rank_V >= limit_P1, 0.0)
    if params.top_p_P is not None:
        # A token stays while the mass before it is less than top_p. The first one always stays.
        mass_PV = sorted_PV.cumsum(dim=-1, dtype=torch.float64)
        before_PV = mass_PV - sorted_PV
        # top_p of 1 keeps everything, whatever the rounding of the sums.
        top_p_P1 = torch.where(params.top_p_P >= 1, torch.inf, params.top_p_P)[:, None]
        drop_PV = before_PV >= top_p_P1 * mass_PV[:, -1:]
        drop_PV[:, 0] = False
        sorted_PV = sorted_PV.masked_fill(drop_PV, 0.0)
    return torch.zeros_like(weights).scatter_(1, order_PV, sorted_PV)


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Draws as arrays, named as in `Draws`; None for arrays that are not reported.

    After `flat` all arrays have one entry per draw.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    lse: NDArray[np.float32]
    top_tokens: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None
    signals: NDArray[np.float32] | None

    def flat(self) -> HostDraws:
        """Return arrays with one entry per draw, repeating the values of each distribution."""
        num_draws = self.tokens.shape[1]
        arrays: list[Any] = [self.lse, self.top_tokens, self.top_logprobs, self.signals]
        if num_draws > 1:
            arrays = [None if a is None else np.repeat(a, num_draws, axis=0) for a in arrays]
        return HostDraws(self.tokens.ravel(), self.logprobs.ravel(), *arrays)

    def at(self, draws: NDArray[np.int64]) -> HostDraws:
        """Return some of the draws, by index."""
        arrays = (getattr(self, name) for name in _NAMES)
        chosen: list[Any] = [None if array is None else array[draws] for array in arrays]
        return HostDraws(*chosen)


_NAMES = tuple(field.name for field in fields(HostDraws))


class AsyncDraws:
    """Draws whose copies to the host are queued."""

    def __init__(self, draws: Draws) -> None:
        """Queue the copies behind the device's current work."""
        tensors = [getattr(draws, field.name) for field in fields(draws)]
        self._fetch = AsyncHostCopy([tensor for tensor in tensors if tensor is not None])
        self._is_reported = [tensor is not None for tensor in tensors]

    def wait(self) -> HostDraws:
        """Wait for the copies, and return the draws."""
        copied = iter(self._fetch.wait())
        arrays: list[Any] = [next(copied) if exists else None for exists in self._is_reported]
        return HostDraws(*arrays)
