"""Penalties on tokens that occur in a text, and tokens that are banned after it.

Shape letters: P distributions, V vocabulary, L tokens of the longest text, U kinds of banned words,
W words, K tokens of a word before its last, N candidate tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.common.params import SamplingParams
from treegen.ops.sampling.logits import column
from treegen.ops.sampling.token_history import NOTHING, TokenHistory

Words = Sequence[Sequence[int]]
"""Words that may not be drawn, each as its tokens."""

_ANY: Final = -2  # padding before the tokens of a shorter word; matches any token


@dataclass(frozen=True, slots=True, eq=False)
class BannedWords:
    """Words that may not be drawn, in U kinds."""

    before_UWK: Tensor
    """The tokens of each word before its last, padded with _ANY at the front."""
    last_UW: Tensor
    """The last token of each word; -1 for padding."""
    index_P: Tensor
    """The kind of each distribution."""

    @staticmethod
    def of(kinds: Sequence[Words], index_P: Tensor) -> BannedWords | None:
        """Return the words of P rows, where row p has kinds[index_P[p]]; None if all are empty."""
        max_words = max((len(words) for words in kinds), default=0)
        if not max_words:
            return None
        longest = max(len(word) for words in kinds for word in words)
        before = np.full((len(kinds), max_words, longest - 1), _ANY, dtype=np.int64)
        last = np.full((len(kinds), max_words), -1, dtype=np.int64)
        for kind, words in enumerate(kinds):
            for at, (*first, end) in enumerate(words):
                before[kind, at, longest - 1 - len(first) :] = first
                last[kind, at] = end
        device = index_P.device
        return BannedWords(to_device(before, device), to_device(last, device), index_P)

    def ending(self, text_PL: Tensor, drawn_PL: Tensor, length_P: Tensor) -> Tensor:
        """Return last tokens [P, W] of words whose other tokens end the text, else NOTHING.

        Args:
            text_PL: Token ids of each text [P, L].
            drawn_PL: Which of the tokens the model has drawn [P, L]. Others do not count.
            length_P: Number of tokens of each text [P].
        """
        before_PWK, last_PW = self.before_UWK[self.index_P], self.last_UW[self.index_P]
        size = before_PWK.shape[-1]
        at_PK = length_P[:, None] - size + torch.arange(size, device=text_PL.device)
        index_PK = at_PK.clamp(min=0)
        exists_PK = (at_PK >= 0) & drawn_PL.gather(1, index_PK)
        tail_PK = torch.where(exists_PK, text_PL.gather(1, index_PK), NOTHING)
        begun_PW = ((before_PWK == tail_PK[:, None]) | (before_PWK == _ANY)).all(dim=-1)
        return torch.where(begun_PW, last_PW, NOTHING)


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Penalties of P distributions that depend on the text before; None for one that none uses."""

    presence_P: Tensor | None
    """Subtracted once from the logit of each token that was drawn."""
    frequency_P: Tensor | None
    """Subtracted from a token's logit once for each time that it was drawn."""
    repetition_P: Tensor | None
    """Divides positive logits of tokens in the text, and multiplies negative ones."""
    ngram_P: Tensor | None
    """Length of token sequences that may not occur twice; 0 for a row without a limit."""
    ngrams: Sequence[int]
    """The distinct lengths in `ngram_P`, without 0."""
    words: BannedWords | None
    """Words that may not be drawn."""

    @staticmethod
    def of(
        params: Sequence[SamplingParams], words: Sequence[Words], index_P: Tensor
    ) -> Penalties | None:
        """Return the penalties of P rows; None if no row has any.

        Args:
            params: Distinct sampling parameters. Row p has params[index_P[p]].
            words: Banned words of each of the parameters, or empty.
            index_P: Index into `params` of each row, int64 [P].
        """
        ngram = column([p.no_repeat_ngram_size for p in params], 0, index_P)
        result = Penalties(
            presence_P=column([p.presence_penalty for p in params], 0, index_P),
            frequency_P=column([p.frequency_penalty for p in params], 0, index_P),
            repetition_P=column([p.repetition_penalty for p in params], 1, index_P),
            ngram_P=None if ngram is None else ngram.long(),
            ngrams=sorted({p.no_repeat_ngram_size for p in params} - {0}),
            words=BannedWords.of(words, index_P),
        )
        columns = (result.presence_P, result.frequency_P, result.repetition_P, ngram, result.words)
        return None if all(value is None for value in columns) else result

    def apply(self, logits_PV: Tensor, texts: TokenHistory) -> Tensor:
        """Return the penalized logits [P, V].

        Banned tokens get a logit of minus infinity, except in a row that would have no token left.

        Args:
            logits_PV: Logits [P, V].
            texts: The text before each draw.
        """
        text_PL, drawn_PL = texts.read()
        if self.repetition_P is not None:
            by_P1 = self.repetition_P[:, None]
            seen_PV = _marks(logits_PV, [text_PL])
            penalized_PV = torch.where(logits_PV > 0, logits_PV / by_P1, logits_PV * by_P1)
            logits_PV = torch.where(seen_PV, penalized_PV, logits_PV)
        if self.presence_P is not None or self.frequency_P is not None:
            count_PV = _counts(logits_PV, torch.where(drawn_PL, text_PL, NOTHING))
            if self.frequency_P is not None:
                logits_PV = logits_PV - self.frequency_P[:, None] * count_PV
            if self.presence_P is not None:
                logits_PV = logits_PV - self.presence_P[:, None] * (count_PV > 0)
        banned: list[Tensor] = []
        if self.ngram_P is not None:
            for size in self.ngrams:
                again_PN = _find_ngram_repeats(text_PL, texts.length_P, size)
                banned.append(again_PN.masked_fill((self.ngram_P != size)[:, None], NOTHING))
        if self.words is not None:
            banned.append(self.words.ending(text_PL, drawn_PL, texts.length_P))
        if not banned:
            return logits_PV
        allowed_PV = logits_PV.masked_fill(_marks(logits_PV, banned), -torch.inf)
        has_any_P1 = (allowed_PV > -torch.inf).any(dim=-1, keepdim=True)
        return torch.where(has_any_P1, allowed_PV, logits_PV)


def _marks(logits_PV: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """Return which tokens of the vocabulary are in `tokens`, tensors [P, N]; bool [P, V]."""
    rows, size = logits_PV.shape
    # An additional column takes entries that are no tokens.
    marks = torch.zeros(rows, size + 1, dtype=torch.bool, device=logits_PV.device)
    for tokens_PN in tokens:
        marks.scatter_(1, torch.where(tokens_PN >= 0, tokens_PN, size), True)
    return marks[:, :size]


def _counts(logits_PV: Tensor, tokens_PN: Tensor) -> Tensor:
    """Return how often each token of the vocabulary occurs in each row, float32 [P, V]."""
    rows, size = logits_PV.shape
    counts = torch.zeros(rows, size + 1, device=logits_PV.device)
    index_PN = torch.where(tokens_PN >= 0, tokens_PN, size)
    # Sums of ones are exact in any order.
    counts.scatter_add_(1, index_PN, torch.ones_like(index_PN, dtype=counts.dtype))
    return counts[:, :size]


def _find_ngram_repeats(text_PL: Tensor, length_P: Tensor, size: int) -> Tensor:
    """Return the tokens [P, N] that would complete a second occurrence of `size` tokens in a text.

    All other entries are NOTHING.
    """
    num, longest = text_PL.shape
    if longest < size:
        return text_PL.new_full((num, 1), NOTHING)
    next_PN = text_PL[:, size - 1 :]
    for at in range(size - 1):
        last_P1 = (length_P - (size - 1) + at).clamp(min=0)[:, None]
        same_PN = text_PL[:, at : longest - (size - 1) + at] == text_PL.gather(1, last_P1)
        next_PN = next_PN.masked_fill(~same_PN, NOTHING)
    return next_PN.masked_fill((length_P < size)[:, None], NOTHING)
