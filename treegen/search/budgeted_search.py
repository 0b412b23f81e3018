"""The budget and usage of a search, the origin of its seeds, and its calls in order.

A budget counts samples in the order of the calls, as if each sample were drawn after the previous
one. So what it cuts follows from the search alone, however many rows decode at once and whichever
sample ends first:

- Samples start together as long as all of them are sure to end within the remaining tokens. The
  rest wait. If no sample is being drawn, the next one starts and is cut where the budget ends.
- Calls return in the order in which they were made, one at a time. Each returns once the search has
  nothing left to run after the previous return. So concurrent parts of a search resume in the same
  order.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from treegen.common.lifetimes import NonCopyable
from treegen.search.budget import Budget, BudgetIgnored, BudgetReached, SearchUsage, StopReason

_MAX_BUDGET_REACHED: Final = 100_000
"""How often BudgetReached is raised before the first BudgetIgnored."""
_MAX_FURTHER_BUDGET_REACHED: Final = 1000
"""How often BudgetReached is raised after each BudgetIgnored, before the next one."""
_MAX_BUDGET_IGNORED: Final = 3
"""How often BudgetIgnored is raised; the last time, the search is abandoned."""


class BudgetedSearch(NonCopyable):
    """The name, budget, usage and randomness of one problem's search.

    Attributes:
        origin: Text that the seeds of its samples follow from, in addition to their paths and the
            seed of the params; by default the name.
        usage: What the search has cost so far.
        call_queue: Its pending calls in order, if its budget counts them; otherwise None.
        stopped: Why further calls are not allowed; None while they are.
        is_abandoned: Whether the search was abandoned, because it kept making calls despite every
            error.
        num_pending_calls: Pending calls for samples and scores.
        num_pending_actions: Pending actions of environments.
        num_counted_actions: Ended actions that the budget counts: those of all distinct replies.
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
        self.call_queue = CallQueue.of(self.budget, self.usage)
        self.stopped: BudgetReached | None = None
        self.is_abandoned = False
        self.num_pending_calls = self.num_pending_actions = self.num_counted_actions = 0
        self._num_drawing = self._num_budget_reached = self._num_budget_ignored = 0

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
        return self.call_queue is not None and self.call_queue.return_next()

    def max_fitting_samples(self, n: int, max_tokens: int) -> int:
        """Return how many of n samples are sure to end within the budget of tokens; at least 0."""
        if self.budget.tokens is None:
            return n
        remaining = self.budget.tokens - self.usage.tokens_decoded
        return max(0, min(n, remaining // max_tokens))

    @contextmanager
    def drawing(self, n: int, *, continues: bool = False) -> Iterator[int]:
        """Reserve budget for samples until the block ends; yield how many of n may be drawn.

        Each sample takes a node and at least one token.

        Args:
            n: Samples to draw.
            continues: Whether the samples belong to a call that has begun, so that the budget need
                not have room for another call.

        Raises:
            BudgetReached: There is no room for one sample.
        """
        if self.stopped is not None or not continues:
            self.check()
        granted = min(n, self.check_room("nodes", "tokens"))
        self._num_drawing += granted
        with self.count_pending_call():
            try:
                yield granted
            finally:
                self._num_drawing -= granted

    @contextmanager
    def count_pending_call(self) -> Iterator[None]:
        """Count a pending call of the model until the block ends."""
        self.num_pending_calls += 1
        try:
            yield
        finally:
            self.num_pending_calls -= 1

    def fits_actions(self, num: int) -> bool:
        """Return whether the budget has room for `num` actions, besides the pending ones."""
        limit = self.budget.actions
        return limit is None or self.num_counted_actions + self.num_pending_actions + num <= limit

    def refuse_actions(self) -> NoReturn:
        """Raise BudgetReached, because the budget has no room for the calls of a reply."""
        reason = self.budget.describe_limit("actions")
        self.stopped = self.stopped or BudgetReached(reason)
        self._refuse(reason)

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
        self._num_budget_reached += 1
        if self._num_budget_reached <= _MAX_BUDGET_REACHED:
            raise BudgetReached(reason, by)
        # So that the search's cleanup code gets BudgetReached again.
        self._num_budget_reached -= _MAX_FURTHER_BUDGET_REACHED
        self._num_budget_ignored += 1
        self.is_abandoned = self._num_budget_ignored >= _MAX_BUDGET_IGNORED
        raise BudgetIgnored(reason)


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedCall:
    """A call for samples or scores."""

    num_samples: int
    """Number of samples requested; 0 for scores."""
    num_open: int
    """Results still to come."""
    return_: Callable[[int], object]
    """Called when the call may return; gets how many of its samples fit the budget."""
    max_tokens: int = 0
    """Maximum number of tokens of one sample."""
    begin: Callable[[int, int, int], object] | None = None
    """Starts samples; gets the index of the first sample in the call, their number, and the maximum
    number of tokens of each. None if they start by themselves and are never cut."""
    num_begun: int = 0
    """Samples that have started."""
    reserved: int = 0
    """Tokens reserved for samples being drawn."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each sample that has ended, by its index."""
    longest: int = 0
    """Tokens of the longest sample that another call returned since this call was made."""

    @property
    def num_waiting(self) -> int:
        """Number of samples that have not started."""
        return 0 if self.begin is None else self.num_samples - self.num_begun


class CallQueue:
    """The calls of one search that have not returned."""

    def __init__(self, budget: Budget, usage: SearchUsage) -> None:
        """Create an empty queue."""
        self._limit, self._usage = budget.tokens, usage
        self._calls: deque[QueuedCall] = deque()
        self._waiting: deque[QueuedCall] = deque()  # those with samples that have not begun
        self._reserved = self._spent = 0  # sums over all queued calls

    @staticmethod
    def of(budget: Budget, usage: SearchUsage) -> CallQueue | None:
        """Return the queue of a search; None if its budget has no limit but seconds."""
        limits = (budget.tokens, budget.calls, budget.nodes, budget.actions)
        return None if all(limit is None for limit in limits) else CallQueue(budget, usage)

    @property
    def calls(self) -> Sequence[QueuedCall]:
        """Calls that have not returned, in order."""
        return self._calls

    def join(self, call: QueuedCall) -> None:
        """Append a call to the queue, and start the samples that fit."""
        self._calls.append(call)
        if call.num_waiting:
            self._waiting.append(call)
            self._begin()

    def record_end(
        self, call: QueuedCall, index: int, tokens: int, *, reserved: int = 0, is_cut: bool = False
    ) -> None:
        """Record that a sample has ended.

        Args:
            call: Call of the sample.
            index: Index of the sample in the call.
            tokens: Tokens that the sample took.
            reserved: Tokens that were reserved for it.
            is_cut: Whether it would have continued with a limit of `call.max_tokens` tokens.
        """
        # A cut sample counts as more tokens than the budget has, so that nothing starts after it.
        call.tokens[index] = self._limit + 1 if is_cut and self._limit is not None else tokens
        call.num_open -= 1
        call.reserved -= reserved
        self._reserved -= reserved
        self._spent += call.tokens[index]
        self._begin()

    def leave(self, call: QueuedCall) -> None:
        """Remove a call whose results nobody waits for any more.

        How far its samples had come depends on timing. So under a budget of tokens each counts as
        if it had decoded in parallel with the longest sample that another call returned.
        """
        if call not in self._calls:
            return
        self._remove(call)
        if self._limit is None:
            self._usage.tokens_decoded += sum(call.tokens.values())
        else:
            remaining = max(0, self._limit - self._usage.tokens_decoded)
            tokens = call.num_samples * min(call.max_tokens, call.longest)
            self._usage.tokens_decoded += min(remaining, tokens)
        self._begin()

    def return_next(self) -> bool:
        """Let the first call return if its results are complete; return whether it does."""
        if not self._calls:
            return False
        call = self._calls[0]
        spent, limit = self._usage.tokens_decoded, self._limit
        is_refused = bool(call.num_samples) and limit is not None and spent >= limit
        if not is_refused and (call.num_open or call.num_waiting):
            return False
        num_kept = longest = 0
        for index in range(0 if is_refused else call.num_samples):
            tokens = call.tokens.get(index)
            if tokens is None:
                break
            if limit is not None and call.begin is not None and spent + tokens > limit:
                spent = limit
                break
            spent += tokens
            longest = max(longest, tokens)
            num_kept += 1
        self._remove(call)
        self._usage.tokens_decoded = spent
        for other in self._calls if limit is not None else ():
            other.longest = max(other.longest, longest)
        call.return_(num_kept)
        self._begin()
        return True

    def _remove(self, call: QueuedCall) -> None:
        self._calls.remove(call)
        if call in self._waiting:
            self._waiting.remove(call)
        self._reserved -= call.reserved
        self._spent -= sum(call.tokens.values())

    def _begin(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            num, max_tokens = self._fitting(call)
            if num and call.begin is not None:
                first = call.num_begun
                call.num_begun += num
                call.reserved += num * max_tokens
                self._reserved += num * max_tokens
                call.begin(first, num, max_tokens)
            elif call.num_waiting:
                break
            if not call.num_waiting:
                self._waiting.popleft()

    def _fitting(self, call: QueuedCall) -> tuple[int, int]:
        """Return how many samples of the next call may start, and the token limit of each."""
        if self._limit is None:
            return call.num_waiting, call.max_tokens
        remaining = self._limit - self._usage.tokens_decoded - self._reserved - self._spent
        if remaining >= call.max_tokens:
            return min(call.num_waiting, remaining // call.max_tokens), call.max_tokens
        if self._reserved or call is not self._calls[0]:
            return 0, 0  # wait until all earlier calls have returned
        if remaining > 0:
            return 1, remaining
        call.num_open -= call.num_waiting  # these never start
        call.num_samples = call.num_begun
        return 0, 0
