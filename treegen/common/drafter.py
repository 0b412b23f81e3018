"""The interface of drafters, which propose the next tokens of rows.

A draft never changes a sample. A row draws at each drafted position what it would draw anyway, and
a draft token is accepted only if it equals that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NOTHING = -1
"""Fills positions of an array where nothing is drafted."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A sample being decoded, which a drafting function receives."""

    prompt_id: str
    """The id of its prompt."""
    sample_index: int
    """Its index among the samples of the prompt."""
    prompt: Sequence[int]
    """The token ids of the prompt; in a search at least the last of them."""
    tokens: Sequence[int]
    """The token ids that the sample has generated so far."""


DraftFunction = Callable[[Sequence[DraftContext]], Sequence[Sequence[int]]]
"""Proposes the next tokens of each of some samples; any number of tokens, or none."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The tokens that are proposed for R rows, at most K per row."""

    tokens_RK: Ints
    """The tokens; NOTHING after the last one of a row."""
    chance_R: NDArray[np.float64]
    """Probability that the first token of each row is accepted."""
    kind_R: Ints
    """How they were proposed; the drafter is told the acceptance of each kind."""
    later_R: NDArray[np.float64] | None = None
    """Probability that each further token is accepted, if the earlier ones were; None for the same
    probability as the first."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens that R rows have drawn."""

    slots: Ints
    """The slots of the rows."""
    request: Ints
    """The number of each row's request."""
    sample: Ints
    """The index of each row's sample."""
    count: Ints
    """The number of tokens that each row had before."""
    tokens_RA: Ints
    """The new tokens; only the first `num_R` of each row are used."""
    num_R: Ints
    """The number of new tokens of each row."""


class PromptInfo(Protocol):
    """The part of a request that a drafter sees: the id and the tokens of its prompt."""

    @property
    def id(self) -> str:
        """The id of the prompt."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Its token ids; in a search at least the last of them."""


class Drafter(Protocol):
    """Proposes tokens. All arrays are over rows; no implementation loops over rows in Python."""

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Learn the tokens that rows have drawn.

        Args:
            new: The new tokens.
            request_of: Returns a request by its number.
        """

    def run_deferred(self) -> None:
        """Do work that may wait until the device is busy."""

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Propose the next tokens of rows.

        Args:
            slots: The slots of R rows.
            room_R: Maximum number of tokens that each row can use.
        """

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """Learn how many draft tokens were accepted.

        Args:
            kind_R: How each row's tokens were proposed.
            tried_R: Number of tokens that were verified.
            accepted_R: Number of tokens that were accepted.
        """
