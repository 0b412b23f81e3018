"""When a sample ends: stop tokens, end of sequence, stop strings and length.

The decode loop asks one table per vocabulary whether a token could end its row; only rows where
it could are looked at in Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from treegen.params import SamplingParams
from treegen.results import FinishReason
from treegen.sampling import NEVER, Bias
from treegen.text import Detokenizer, StopStrings, special_tokens

if TYPE_CHECKING:
    from treegen.text import Tokens

_MOST_KEPT: Final = 32

Verdict = tuple[FinishReason, str | int | None, str]
"""Finish reason, what stopped a sample, and its text."""


class Stopping:
    """Stop conditions of one set of sampling parameters.

    may_end: bool [vocab_size], tokens after which a sample may be over. ids: tokens after which
    it is.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Stop conditions for a model with this vocabulary and these end-of-sequence ids."""
        eos = () if params.ignore_eos else eos_token_ids
        self._detokenizer = Detokenizer(tokenizer)
        # No text shows a special token, only tokens that happen to spell it.
        special = special_tokens(tokenizer, self._detokenizer) if params.stops else {}
        self._named = {special[stop]: stop for stop in params.stops if stop in special}
        self._strings = StopStrings(tokenizer, params.stops, vocab_size) if params.stops else None
        self._eos, self._asked = frozenset(eos), frozenset((*params.stop_token_ids, *self._named))
        self.ids = frozenset(id for id in self._eos | self._asked if id < vocab_size)
        self._include_stop, self._least = params.include_stop, params.min_tokens
        self.may_end: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        if self._strings is not None:
            self.may_end |= self._strings.may_end
        self.may_end[list(self.ids)] = True

    def verdict(self, prompt: Tokens, tokens: Sequence[int], limit: int) -> Verdict | None:
        """How a sample ends; None if it goes on."""
        return self.verdicts([prompt], [tokens], [limit])[0]

    def verdicts(
        self,
        prompts: Sequence[Tokens],
        samples: Sequence[Sequence[int]],
        limits: Sequence[int],
    ) -> list[Verdict | None]:
        """How samples end, each after a prompt and with a number of tokens at most."""
        verdicts: list[Verdict | None] = [None] * len(samples)
        over: list[int] = []
        for at, (prompt, tokens, limit) in enumerate(zip(prompts, samples, limits, strict=True)):
            if tokens[-1] in self.ids:
                over.append(at)
                continue
            hit = None
            # Tokens before the last cannot have completed a stop, or the sample would be over.
            may_end = self._strings is not None and self._strings.may_end[tokens[-1]]
            if self._strings and may_end and len(tokens) > self._least:
                hit = self._strings.hit(prompt, tokens, num_new=1, since=self._least)
            if hit is not None:
                text, stop = hit
                verdicts[at] = "stop", stop, text + stop * self._include_stop
            elif len(tokens) >= limit:
                over.append(at)
        texts = self._detokenizer.texts(
            [prompts[at] for at in over], [self.kept(samples[at]) for at in over]
        )
        for at, text in zip(over, texts, strict=True):
            token = samples[at][-1]
            if token not in self.ids:
                verdicts[at] = "length", None, text
                continue
            name = self._named.get(token, "")
            # That the model has ended the text is worth more than how its end is written.
            end = name if name and token not in self._eos else token
            verdicts[at] = "stop", end, text + name * self._include_stop
        return verdicts

    def kept(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of a sample that is over, without the stop token unless it is to stay."""
        last = tokens[-1]
        stays = last not in self.ids or (self._include_stop and last in self._asked)
        return tokens if stays else tokens[:-1]


class Stoppings:
    """Stop conditions used last; the table over a large vocabulary takes a while to make."""

    def __init__(self) -> None:
        self._made = functools.lru_cache(maxsize=_MOST_KEPT)(_make)

    def of(
        self, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int
    ) -> Stopping:
        """Those that sampling parameters ask for, as `Stopping` makes them."""
        stops = SamplingParams(
            stop=params.stops,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
            max_tokens=max(params.min_tokens, 1),
        )
        # A tokenizer may be given further tokens meanwhile.
        return self._made(stops, tokenizer, len(tokenizer), tuple(eos_token_ids), vocab_size)


def _make(
    stops: SamplingParams, tokenizer: Any, size: int, eos_ids: tuple[int, ...], vocab_size: int
) -> Stopping:
    return Stopping(stops, tokenizer, eos_ids, vocab_size)


@dataclass(frozen=True)
class ParamSet:
    """Sampling parameters that requests may have, and when they end a sample."""

    params: SamplingParams
    stopping: Stopping

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0

    @functools.cached_property
    def bias(self) -> Bias:
        """What is added to logits before a draw."""
        least = self.params.min_tokens
        stops = [(token, -math.inf, least) for token in sorted(self.stopping.ids) if least]
        own = [(token, value, NEVER) for token, value in self.params.biases]
        token, value, until = zip(*stops, *own, strict=True) if stops or own else ((), (), ())
        return Bias(
            np.array(token, np.int64), np.array(value, np.float32), np.array(until, np.int64)
        )
