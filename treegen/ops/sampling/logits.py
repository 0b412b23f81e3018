"""Operations on rows of logits: masks of allowed tokens, log-sum-exps and the most likely tokens.

`column` and `slice_rows` make and slice columns: tensors with one number per row, in dataclasses
of sampling parameters.

On a CPU intermediate results stay in its cache, because new memory of the size of the logits would
cost more than the sums.

Shape letters: P distributions, K masks, W words of 32 tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device

_T = TypeVar("_T")


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


_IN_CACHE: Final = 2**16  # logits that are summed at once on a CPU
_BLOCK: Final = 128  # tokens of a block, whose largest logit is found first
_WIDE: Final = 8  # vocabulary size, in multiples of the result's, from which topk prefilters


def log_sum_exp(logits_PV: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, float32 [P]; not finite if some logit is NaN.

    Sums are float64, because torch sums few rows in another order, which would show in the last
    digit.
    """
    if logits_PV.device.type != "cpu":
        return _log_sum_exp(logits_PV)
    num_rows = max(_IN_CACHE // logits_PV.shape[1], 1)
    return torch.cat([_log_sum_exp(part) for part in logits_PV.split(num_rows)])


def _log_sum_exp(logits_PV: Tensor) -> Tensor:
    top_P = logits_PV.amax(dim=-1)
    sums_P = (logits_PV - top_P[:, None]).exp_().sum(dim=-1, dtype=torch.float64)
    return (top_P + sums_P.log()).float()


def argmax_tokens(logits_PV: Tensor) -> Tensor:
    """Return the first token with the largest logit of each row, int64 [P].

    On a CPU torch takes three times as long to find the index of a maximum as its value. So the
    block with the maximum is found first.
    """
    size = logits_PV.shape[1]
    if logits_PV.device.type != "cpu" or size < 2 * _BLOCK:
        return logits_PV.argmax(dim=-1)
    in_blocks = size - size % _BLOCK
    max_PB = logits_PV[:, :in_blocks].unflatten(1, (-1, _BLOCK)).amax(dim=-1)
    if in_blocks < size:
        max_PB = torch.cat([max_PB, logits_PV[:, in_blocks:].amax(dim=-1, keepdim=True)], dim=1)
    start_P = max_PB.argmax(dim=-1) * _BLOCK
    token_PW = (start_P[:, None] + torch.arange(_BLOCK)).clamp_(max=size - 1)
    most_likely_P: Tensor = start_P + logits_PV.gather(1, token_PW).argmax(dim=-1)
    return most_likely_P


def topk_logits(logits_PV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their tokens, largest first, [P, num] each.

    On a CPU most of a large vocabulary is dropped first: tokens are divided into blocks, and only
    logits that reach the num-th largest block maximum can be in the result.
    """
    size = logits_PV.shape[1]
    if logits_PV.device.type != "cpu" or size < _WIDE * num:
        values, tokens = logits_PV.topk(num, dim=-1)
        return values, tokens
    depth = math.isqrt(size // num)
    blocks = size // depth
    max_PB = logits_PV[:, : depth * blocks].unflatten(1, (depth, blocks)).amax(dim=1).numpy()
    threshold_P = np.partition(max_PB, blocks - num, axis=1)[:, blocks - num]
    logit_PK = np.empty((len(logits_PV), num), dtype=np.float32)
    token_PK = np.empty((len(logits_PV), num), dtype=np.int64)
    for row, (logit_V, floor) in enumerate(zip(logits_PV.numpy(), threshold_P, strict=True)):
        at = np.flatnonzero(~(logit_V < floor))  # keeps NaN
        at = at[np.argsort(-logit_V[at], kind="stable")[:num]]
        logit_PK[row], token_PK[row] = logit_V[at], at
    return torch.from_numpy(logit_PK), torch.from_numpy(token_PK)


def column(values: Sequence[float], neutral: float, index_P: Tensor) -> Tensor | None:
    """Return one number per row, float32 [P]; None if all are neutral.

    Args:
        values: The number of each set of parameters.
        neutral: The number that has no effect.
        index_P: The set of each row, int64 [P].
    """
    if all(value == neutral for value in values):
        return None
    return to_device(np.array(values, dtype=np.float32), index_P.device)[index_P]


def slice_rows(params: _T, rows: slice) -> _T:
    """Return a dataclass with some of its rows.

    Each tensor whose name says [P, ...] is sliced, in nested dataclasses too.
    """
    instance: Any = params
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(instance)):
        value = getattr(instance, name)
        if isinstance(value, Tensor) and name.rpartition("_")[2].startswith("P"):
            changes[name] = value[rows]
        elif is_dataclass(value):
            changes[name] = slice_rows(value, rows)
        elif isinstance(value, list) and all(map(is_dataclass, value)):
            changes[name] = [slice_rows(item, rows) for item in value]
    part: _T = replace(instance, **changes)
    return part
