"""What guesses the next tokens of rows, and what it is told.

A guess never changes a sample. A row draws at each guessed position what it would draw anyway, and
a guess is accepted only if it is that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NOTHING = -1
"""In place of a token where nothing is drafted."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A sample under way, as a drafting function gets it.

    prompt_id: the id of its prompt. sample_index: its number among the samples of the prompt.
    prompt: the token ids of the prompt; in a search at least the last of them.
    tokens: the token ids that the sample has generated so far.
    """

    prompt_id: str
    sample_index: int
    prompt: Sequence[int]
    tokens: Sequence[int]


DraftFunction = Callable[[Sequence[DraftContext]], Sequence[Sequence[int]]]
"""Guesses, for each of some samples, which tokens come next; as many as it likes, or none."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The tokens that R rows are thought to draw next, K at most.

    tokens_RK: the tokens; NOTHING after the last one of a row.
    chance_R: how likely the first of each row is to be accepted.
    kind_R: what they were guessed by; the drafter is told how its guesses of a kind fared.
    later_R: how likely each further one is, if those before it were; None for as likely.
    """

    tokens_RK: Ints
    chance_R: NDArray[np.float64]
    kind_R: Ints
    later_R: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What rows have drawn.

    slots: the slots of R rows. request: the number of each row's request.
    sample: the index of each row's sample.
    count: how many tokens each row had before.
    tokens_RA: the new tokens; after `num_R` of them the rest is not used.
    """

    slots: Ints
    request: Ints
    sample: Ints
    count: Ints
    tokens_RA: Ints
    num_R: Ints


class PromptInfo(Protocol):
    """A request, as far as a drafter is told: the id and the tokens of its prompt."""

    @property
    def id(self) -> str:
        """The id of the prompt."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Its token ids; in a search at least the last of them."""
        ...


class Drafter(Protocol):
    """Guesses tokens. All arrays are over rows; nothing may be done for a row in Python."""

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Learn what rows have drawn. request_of: gives a request by its number."""
        ...

    def run_deferred(self) -> None:
        """Do what may wait until the device is busy."""
        ...

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Guess the next tokens of rows. room_R: how many of each can be used at most."""
        ...

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """How guesses fared: of so many that were verified, so many were accepted."""
        ...
