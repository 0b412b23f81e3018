"""The budget and usage of a search, and the origin of its seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, NoReturn

from treegen.common.non_copyable import NonCopyable
from treegen.search.budget import Budget, BudgetIgnored, BudgetReached, SearchUsage, StopReason
from treegen.search.call_queue import CallQueue

_PATIENCE: Final = 100_000
"""How often BudgetReached is raised before BudgetIgnored is."""
_MORE: Final = 1000
"""How often BudgetReached is raised again after each BudgetIgnored."""
_ENDS: Final = 3
"""How often BudgetIgnored is raised before the search is abandoned."""


class BudgetedSearch(NonCopyable):
    """The name, budget, usage and randomness of one problem's search.

    Attributes:
        origin: Text that the seeds of its samples follow from, in addition to their paths and the
            seed of the params; by default the name.
        usage: What the search has cost so far.
        line: Its calls in order, if its budget counts them; otherwise None.
        stopped: Why further calls are not allowed; None while they are.
        is_abandoned: Whether the search was given up, because it kept making calls despite every
            error.
        num_asked: Pending calls for samples and scores.
    """

    def __init__(self, name: str, budget: Budget | None, origin: str | None) -> None:
        """Create a search without calls.

        Args:
            name: Name of the search.
            budget: Its limits; None is no limit.
            origin: Text that the seeds follow from; None is the name.
        """
        self.name = name
        self.origin = origin if origin is not None else name
        self.budget = budget or Budget()
        self.usage = SearchUsage()
        self.line = CallQueue.of(self.budget, self.usage)
        self.stopped: BudgetReached | None = None
        self.is_abandoned = False
        self.num_asked = self._num_drawing = self._num_refused = self._num_ended = 0

    def origin_of(self, key: str) -> str:
        """Return the origin of the seeds of a node's samples."""
        return self.origin + key.removeprefix(self.name)

    def stop(self, reason: str, by: StopReason = StopReason.STOPPED) -> None:
        """End the search. Further calls raise BudgetReached.

        Args:
            reason: A sentence for people.
            by: The reason for programs.
        """
        if self.stopped is None:
            self.stopped = BudgetReached(reason, by)

    def check(self) -> None:
        """Raise BudgetReached if no further call is allowed.

        Pending calls were within the budget when they started, and may finish.
        """
        if self.stopped is None and (reason := self.budget.describe_exceeded(self.usage)):
            self.stopped = BudgetReached(reason)
        if self.stopped is not None:
            self._refuse(str(self.stopped), self.stopped.by)

    def return_next(self) -> bool:
        """Let the first queued call return if its results are complete; return whether it does.

        Call it when nothing of the search can run.
        """
        return self.line is not None and self.line.return_next()

    def max_fitting_samples(self, n: int, max_tokens: int) -> int:
        """Return how many of n samples are sure to end within the budget of tokens; at least 0."""
        if self.budget.tokens is None:
            return n
        left = self.budget.tokens - self.usage.tokens_decoded
        return max(0, min(n, left // max_tokens))

    @contextmanager
    def drawing(self, n: int) -> Iterator[int]:
        """Draw samples inside; yield how many of n the budget has room for.

        Each sample takes a node and at least one token.

        Raises:
            BudgetReached: There is no room for one sample.
        """
        self.check()
        granted = min(n, self.check_room("nodes", "tokens"))
        self._num_drawing += granted
        with self.asking():
            try:
                yield granted
            finally:
                self._num_drawing -= granted

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count the code inside as a pending call of the model."""
        self.num_asked += 1
        try:
            yield
        finally:
            self.num_asked -= 1

    def check_room(self, *names: Literal["nodes", "tokens"]) -> int:
        """Return how many samples the named limits have room for, besides the pending ones.

        Raises:
            BudgetReached: There is no room for one sample.
        """
        spent = {"nodes": self.usage.nodes, "tokens": self.usage.tokens_decoded}
        room = sys.maxsize
        for name in names:
            limit = getattr(self.budget, name)
            if limit is not None:
                room = min(room, limit - spent[name] - self._num_drawing)
            if room < 1:
                self._refuse(self.budget.describe_limit(name))
        return room

    def _refuse(self, reason: str, by: StopReason = StopReason.BUDGET) -> NoReturn:
        self._num_refused += 1
        if self._num_refused <= _PATIENCE:
            raise BudgetReached(reason, by)
        self._num_refused -= _MORE  # so that the search's cleanup code gets BudgetReached again
        self._num_ended += 1
        self.is_abandoned = self._num_ended >= _ENDS
        raise BudgetIgnored(reason)
