"""Penalties, slowly and plainly: token by token, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treegen.params import SamplingParams
from treegen.sampling.param_set import ParamSet


def plain(params: SamplingParams) -> SamplingParams:
    """The parameters without all that `slow_logits` does."""
    return replace(
        params, presence_penalty=0, frequency_penalty=0, repetition_penalty=1,
        no_repeat_ngram_size=0, bad_words=(), logit_bias=None, min_tokens=0,
    )  # fmt: skip


def slow_logits(
    logits: Tensor, text: Sequence[int], drawn: Sequence[bool], each: ParamSet, step: int
) -> Tensor:
    """The logits [V] that a token is drawn from.

    text: all tokens before it. drawn: which of them were drawn. step: tokens of the sample so far.
    """
    params, bias, logits = each.params, each.bias, logits.float().clone()
    for token, value, until in zip(bias.token, bias.value, bias.until, strict=True):
        if step < until:
            logits[int(token)] += float(value)
    for token in set(text):
        by = params.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    mine = [token for token, is_drawn in zip(text, drawn, strict=True) if is_drawn]
    for token in set(mine):
        logits[token] -= torch.tensor(params.frequency_penalty) * mine.count(token)
        logits[token] -= params.presence_penalty
    banned = set()
    size = params.no_repeat_ngram_size
    for start in range(len(text) - size + 1 if size else 0):
        *before, last = text[start : start + size]
        if before == list(text[len(text) - size + 1 :]):
            banned.add(last)
    for *before, last in each.stopping.bad_words:
        begun = list(text[len(text) - len(before) :]) == before
        if begun and all(drawn[len(text) - len(before) :]):
            banned.add(last)
    given = logits.clone()
    given[list(banned)] = -torch.inf
    return given if (given > -torch.inf).any() else logits
