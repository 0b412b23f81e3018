"""Guesses for tests: by a function that knows what is drawn, and a pace that verifies all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from treegen import LLM, Completion
from treegen.common.drafter import DraftContext, Ints
from treegen.engine.speculative.draft_length import DraftLengthController


class Always(DraftLengthController):
    """Verifies whatever is guessed, in every step."""

    def is_due(self, num_rows: int, keys: int, most: int) -> bool:
        return True

    def choose_lengths(
        self, num_R: Ints, chance_R: object, keys: int, most: int, later_R: object = None
    ) -> tuple[Ints, float]:
        return num_R, 1.0


class Knowing:
    """Guesses what samples drew before; some guesses are wrong, short or none.

    strict: fails where a sample is another one than before.
    """

    def __init__(
        self, completions: Iterable[Completion], seed: int = 0, *, strict: bool = True
    ) -> None:
        self._strict = strict
        self._known = {(c.prompt_id, c.sample_index): c.tokens for c in completions}
        self._rng = np.random.default_rng(seed)

    def __call__(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [self._guess(context) for context in contexts]

    def _guess(self, context: DraftContext) -> list[int]:
        known = self._known.get((context.prompt_id, context.sample_index), ())
        start = len(context.tokens)
        same = tuple(context.tokens) == known[:start]
        assert same or not self._strict, "a sample is another than without guesses"
        guess = list(known[start : start + int(self._rng.integers(0, 8))])
        if guess and self._rng.random() < 0.4:
            guess[int(self._rng.integers(len(guess)))] = int(self._rng.integers(-1, 400))
        return guess


def guessed(llm: LLM, how: object) -> LLM:
    """The LLM, which guesses from now on."""
    llm.engine.drafters.speculate = how  # type: ignore[assignment]
    return llm
