"""When a sample ends: stop tokens, end of sequence, stop strings and length.

The decode loop asks one table per vocabulary whether a token could end its row; only rows where
it could are looked at in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from treegen.params import SamplingParams
from treegen.results import FinishReason
from treegen.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from treegen.text import Tokens

_MOST_KEPT: Final = 32

Verdict = tuple[FinishReason, str | int | None, str]
"""Finish reason, what stopped a sample, and its text."""


class Stopping:
    """Stop conditions of one set of sampling parameters.

    may_end: bool [vocab_size], tokens after which a sample may be over.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Stop conditions for a model with this vocabulary and these end-of-sequence ids."""
        eos = () if params.ignore_eos else eos_token_ids
        self._ids = frozenset((*params.stop_token_ids, *eos))
        self._strings = StopStrings(tokenizer, params.stops, vocab_size) if params.stops else None
        self._detokenizer = Detokenizer(tokenizer)
        self._include_stop = params.include_stop
        self.may_end: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        if self._strings is not None:
            self.may_end |= self._strings.may_end
        self.may_end[[token for token in self._ids if token < vocab_size]] = True

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
        stops: dict[int, int | None] = {}
        for at, (prompt, tokens, limit) in enumerate(zip(prompts, samples, limits, strict=True)):
            if tokens[-1] in self._ids:
                stops[at] = tokens[-1]
                continue
            hit = None
            # Tokens before the last cannot have completed a stop, or the sample would be over.
            if self._strings and self._strings.may_end[tokens[-1]]:
                hit = self._strings.hit(prompt, tokens, num_new=1)
            if hit is not None:
                text, stop = hit
                verdicts[at] = "stop", stop, text + stop * self._include_stop
            elif len(tokens) >= limit:
                stops[at] = None
        texts = self._detokenizer.texts(
            [prompts[at] for at in stops],
            [samples[at][:-1] if stop is not None else samples[at] for at, stop in stops.items()],
        )
        for (at, stop_id), text in zip(stops.items(), texts, strict=True):
            verdicts[at] = "length" if stop_id is None else "stop", stop_id, text
        return verdicts


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
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            include_stop=params.include_stop,
        )
        # A tokenizer may be given further tokens meanwhile.
        return self._made(stops, tokenizer, len(tokenizer), tuple(eos_token_ids), vocab_size)


def _make(
    stops: SamplingParams, tokenizer: Any, size: int, eos_ids: tuple[int, ...], vocab_size: int
) -> Stopping:
    return Stopping(stops, tokenizer, eos_ids, vocab_size)


@dataclass(frozen=True, slots=True)
class ParamSet:
    """Sampling parameters that requests may have, and when they end a sample."""

    params: SamplingParams
    stopping: Stopping

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0
