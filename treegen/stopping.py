"""When a sample ends: stop tokens, end of sequence, stop strings and length.

The decode loop asks one table per vocabulary whether a token could end its row; only rows where
it could are looked at in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegen.params import SamplingParams
from treegen.radix import Tokens
from treegen.results import FinishReason
from treegen.text import Detokenizer, StopStrings


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

    def verdict(
        self, prompt: Sequence[int] | Tokens, tokens: Sequence[int], limit: int
    ) -> tuple[FinishReason, str | int | None, str] | None:
        """Finish reason, what stopped it, and text of a sample; None if it goes on."""
        ends = tokens[-1] in self._ids
        if self._strings is not None and not ends:
            # Tokens before the last cannot have completed a stop, or the sample would be over.
            hit = self._strings.hit(prompt, tokens, num_new=1)
            if hit is not None:
                text, stop = hit
                return "stop", stop, text + stop * self._include_stop
        if ends:
            return "stop", int(tokens[-1]), self._detokenizer.text(prompt, tokens[:-1])
        if len(tokens) >= limit:
            return "length", None, self._detokenizer.text(prompt, tokens)
        return None


@dataclass(frozen=True, slots=True)
class ParamSet:
    """Sampling parameters that requests may have, and when they end a sample."""

    params: SamplingParams
    stopping: Stopping

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0
