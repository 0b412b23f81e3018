"""The contexts of live nodes, and tickets for the results that searches wait for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.prompts.radix import Tokens
from treegen.prompts.tokens import TAIL, GivenPrompt
from treegen.search.budgeted_search import BudgetedSearch, QueuedCall
from treegen.search.external_calls import running_loop

T = TypeVar("T")


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
class PendingResults(Generic[T]):
    """Results that a search waits for (a "ticket")."""

    search: BudgetedSearch
    """The search that waits."""
    results: list[T | None]
    """Results in the order of the request; None for one that has not arrived."""
    call: QueuedCall | None = None
    """Its place in the call queue of the search, if it has one."""
    num_kept: int = sys.maxsize
    """How many of its samples the budget has room for."""
    requests: dict[LiveRequest, int] = field(default_factory=dict)
    """Unfinished requests of the scheduler, each with the place of its first result."""
    future: asyncio.Future[None] | None = None
    """What an event loop waits for; None without one."""
    is_done: bool = False
    """Whether no more results will arrive."""

    def deliver(self, num_kept: int) -> None:
        """Finish; only the first `num_kept` samples are within the budget."""
        self.num_kept = num_kept
        self.finish()

    def finish(self) -> None:
        """Record that no more results will arrive, and resume the code that awaits them."""
        self.is_done = True
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def __await__(self) -> Generator[Any, None, list[T | None]]:
        if not self.is_done:
            loop = running_loop()
            if loop is None:  # `Session.step` drives the coroutine.
                yield
            else:
                self.future = loop.create_future()
                yield from self.future
        return self.results
