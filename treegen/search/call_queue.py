"""The calls of a search that has a budget, in the order in which it made them.

A budget counts samples in the order in which they were asked for, as if each were drawn after the
one before. So what it cuts follows from the search alone, however many rows decode at once and
whichever sample ends first:

- Samples begin together as long as all of them are sure to end within the tokens that are left.
  The others wait. If nothing is under way, the next one begins and is cut where the budget ends.
- Calls return in the order in which they were made, one at a time, each once the search has come
  to rest after the one before. So parts of a search that run side by side go on in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treegen.search.budget import Budget

if TYPE_CHECKING:
    from treegen.search.budget import SearchUsage


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedCall:
    """A call for samples or scores.

    num_samples: samples that it asks for; 0 for scores.
    most: the most tokens of one sample.
    begin: begins samples; gets the place of the first among its own, their number, and the most
    tokens of each. None if they begin by themselves and are never cut.
    return_: called when it may return; gets how many of its samples the budget has room for.
    num_begun: samples that have begun.
    num_open: results that are to come.
    held: tokens that samples under way may take.
    tokens: of each sample that has ended, by its place.
    seen: tokens of the longest sample that another call returned since this one was made.
    """

    num_samples: int
    num_open: int
    return_: Callable[[int], object]
    most: int = 0
    begin: Callable[[int, int, int], object] | None = None
    num_begun: int = 0
    held: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    @property
    def num_waiting(self) -> int:
        """Samples that have not begun."""
        return 0 if self.begin is None else self.num_samples - self.num_begun


class CallQueue:
    """The calls of one search that have not returned."""

    def __init__(self, budget: Budget, usage: SearchUsage) -> None:
        """A line without calls."""
        self._limit, self._usage = budget.tokens, usage
        self._calls: deque[QueuedCall] = deque()
        self._waiting: deque[QueuedCall] = deque()  # those with samples that have not begun
        self._held = self._spent = 0  # of all calls in line

    @staticmethod
    def of(budget: Budget, usage: SearchUsage) -> CallQueue | None:
        """The line of a search; None if its budget does not count what it asks for."""
        limits = (budget.tokens, budget.calls, budget.nodes)
        return None if all(limit is None for limit in limits) else CallQueue(budget, usage)

    @property
    def calls(self) -> Sequence[QueuedCall]:
        """Calls that have not returned, in order."""
        return self._calls

    def join(self, call: QueuedCall) -> None:
        """Add a call at the end of the line, and begin what fits."""
        self._calls.append(call)
        if call.num_waiting:
            self._waiting.append(call)
            self._begin()

    def record_end(
        self, call: QueuedCall, place: int, tokens: int, *, held: int = 0, is_cut: bool = False
    ) -> None:
        """Note that a sample has ended.

        Args:
            tokens: How many it took.
            held: The most that it might have taken.
            is_cut: Whether it would have gone on if `held` were `call.most`.
        """
        # One that is cut counts as more than there is, so that nothing begins after it.
        call.tokens[place] = self._limit + 1 if is_cut and self._limit is not None else tokens
        call.num_open -= 1
        call.held -= held
        self._held -= held
        self._spent += call.tokens[place]
        self._begin()

    def leave(self, call: QueuedCall) -> None:
        """Take out a call whose results nobody waits for any more.

        How far its samples had come depends on the moment. So under a budget of tokens each counts
        as if it had decoded side by side with the longest one that another call returned.
        """
        if call not in self._calls:
            return
        self._remove(call)
        if self._limit is None:
            self._usage.tokens_decoded += sum(call.tokens.values())
        else:
            left = max(0, self._limit - self._usage.tokens_decoded)
            taken = call.num_samples * min(call.most, call.seen)
            self._usage.tokens_decoded += min(left, taken)
        self._begin()

    def return_next(self) -> bool:
        """Let the first call return if its results are there; whether it does."""
        if not self._calls:
            return False
        call = self._calls[0]
        spent, limit = self._usage.tokens_decoded, self._limit
        is_refused = bool(call.num_samples) and limit is not None and spent >= limit
        if not is_refused and (call.num_open or call.num_waiting):
            return False
        num_kept = longest = 0
        for place in range(0 if is_refused else call.num_samples):
            tokens = call.tokens.get(place)
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
            other.seen = max(other.seen, longest)
        call.return_(num_kept)
        self._begin()
        return True

    def _remove(self, call: QueuedCall) -> None:
        self._calls.remove(call)
        if call in self._waiting:
            self._waiting.remove(call)
        self._held -= call.held
        self._spent -= sum(call.tokens.values())

    def _begin(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            num, most = self._fitting(call)
            if num and call.begin is not None:
                first = call.num_begun
                call.num_begun += num
                call.held += num * most
                self._held += num * most
                call.begin(first, num, most)
            elif call.num_waiting:
                break
            if not call.num_waiting:
                self._waiting.popleft()

    def _fitting(self, call: QueuedCall) -> tuple[int, int]:
        """How many samples of the next call may begin, and the most tokens of each."""
        if self._limit is None:
            return call.num_waiting, call.most
        left = self._limit - self._usage.tokens_decoded - self._held - self._spent
        if left >= call.most:
            return min(call.num_waiting, left // call.most), call.most
        if self._held or call is not self._calls[0]:
            return 0, 0  # until all before it have returned
        if left > 0:
            return 1, left
        call.num_open -= call.num_waiting  # these never begin
        call.num_samples = call.num_begun
        return 0, 0
