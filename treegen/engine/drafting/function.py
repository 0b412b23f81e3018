"""A drafter that calls a user's function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from treegen.common.drafter import (
    NOTHING,
    DraftContext,
    DraftFunction,
    Drafts,
    Ints,
    NewTokens,
    PromptInfo,
)
from treegen.engine.drafting.acceptance import AcceptanceEstimator
from treegen.errors import InputError


class FunctionDrafter:
    """Calls a function once per step, for all rows."""

    def __init__(self, function: DraftFunction) -> None:
        """Set up a drafter that knows no row yet."""
        self._function = function
        self._rows: dict[int, DraftContext] = {}
        self._chance = AcceptanceEstimator()

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Add new tokens to the texts of rows."""
        columns = (new.slots, new.request, new.sample, new.count, new.num_R)
        columns_of_rows = zip(*(column.tolist() for column in columns), new.tokens_RA, strict=True)
        for slot, request, sample, count, num, tokens in columns_of_rows:
            if not count:
                prompt = request_of(request)
                self._rows[slot] = DraftContext(prompt.id, sample, prompt.tokens.tolist(), [])
            generated = self._rows[slot].tokens
            assert isinstance(generated, list)
            generated += tokens[:num].tolist()

    def run_deferred(self) -> None:
        """Do nothing: this drafter defers no work."""

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Return the draft tokens of the function.

        Args:
            slots: Slots of the rows, [R].
            room_R: Maximum number of draft tokens of each row, [R].

        Raises:
            InputError: the function does not return a list of token ids for each row.
        """
        most = int(room_R.max(initial=0))
        tokens_RK = np.full((len(slots), most), NOTHING)
        drafts = self._function([self._rows[slot] for slot in slots.tolist()])
        try:
            if len(drafts) != len(slots):
                raise ValueError
            for row, guess in zip(tokens_RK, drafts, strict=True):
                ids = np.array(list(islice(guess, most)))
                if len(ids) and not np.issubdtype(ids.dtype, np.integer):
                    raise TypeError
                row[: len(ids)] = ids
        except (TypeError, ValueError):
            raise InputError(
                f"speculate's function must return a list of token ids for each of {len(slots)} "
                f"samples, got {drafts!r:.80}"
            ) from None
        chance_R = np.full(len(slots), self._chance.value)
        return Drafts(tokens_RK, chance_R, np.zeros(len(slots), dtype=np.int64))

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """Update the estimated acceptance rate.

        Args:
            kind_R: Not used; this drafter has one kind of draft tokens.
            tried_R: Number of tried draft tokens of each row, [R].
            accepted_R: Number of accepted draft tokens of each row, [R].
        """
        self._chance.learn(tried_R, accepted_R)
