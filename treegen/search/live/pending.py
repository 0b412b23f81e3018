"""The contexts of live nodes, and tickets for the results that searches wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.prompts.radix import Tokens
from treegen.prompts.tokens import TAIL, GivenPrompt
from treegen.search.pending import PendingResults, T


@dataclass(slots=True, eq=False)
class LiveContext:
    """The context of a node."""

    segment: LiveSegment
    """The segment that ends with the node."""
    given: GivenPrompt | None
    """The text or token ids of the context; None if some of it was generated."""
    released: bool = False
    """Whether it was released."""
    _ids: Tokens | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of the prompt."""
        return self.segment.stop

    @property
    def ids(self) -> Tokens:
        """Token ids that appended text has to look at: the last ones, or all of given text.

        Only the thread of the engine may read them the first time.
        """
        if self._ids is None:
            self._ids = self.tail() if self.given is None else self.segment.path_tokens()
        return self._ids

    def path_tokens(self) -> list[int]:
        """Return all token ids, from the start of the prompt."""
        tokens: list[int] = self.segment.path_tokens().tolist()
        return tokens

    def tail(self) -> Tokens:
        """Return the last tokens, as many as appending text has to look at."""
        parts: list[Tokens] = []
        missing = TAIL
        for segment in self.segment.path():
            parts.append(segment.tokens[-missing:])
            missing -= len(parts[-1])
            if missing <= 0:
                break
        return np.concatenate(parts[::-1])


@dataclass(slots=True, eq=False)
class LiveResults(PendingResults[T]):
    """Results that a search waits for, which requests of the scheduler compute."""

    requests: dict[LiveRequest, int] = field(default_factory=dict)
    """Unfinished requests of the scheduler, each with the place of its first result."""
