"""One running search function: its time limit, its end, and its result."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final

from treegen.search.budget import BudgetIgnored, BudgetReached, StopReason
from treegen.search.event_loop import IdleLoop
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchResult

_AGAIN: Final = 0.1
"""Seconds between ending two waits of one search, in which it cleans up after the first."""


class RunningSearch:
    """A search function in an event loop, which ends when the seconds of its budget are over.

    Its pending calls of the model then end by themselves. Anything else that it awaits, such as a
    tool, is cancelled, and BudgetReached is raised there. So a strategy returns what it has found.
    """

    def __init__(
        self, loop: IdleLoop, fn: SearchFn, search: Search, on_end: Callable[[SearchResult], None]
    ) -> None:
        """Start the search.

        Args:
            loop: The event loop.
            fn: The search function.
            search: The search that it works on.
            on_end: Called with the result.
        """
        self.search = search
        self._loop, self._on_end, self._is_over = loop, on_end, False
        self._stopped_by: StopReason | None = None
        self._due: float | None = None  # when `end_wait` may end its next wait, once time is up
        self._raises: BudgetReached | None = None  # raised instead of the pending cancellation
        self.task = loop.create_task(self._run(fn))
        if (seconds := search.budget.seconds) is not None:
            loop.call_later(max(0.0, seconds - search.usage.elapsed_seconds()), self._time_is_up)

    def _time_is_up(self) -> None:
        if not self.task.done():
            self.search.stop(self.search.budget.describe_limit("seconds"), StopReason.BUDGET)
            self._due = self._loop.time()

    def end_wait(self) -> bool:
        """End the wait of a search whose time is up; return whether a wait was ended.

        A wait is not ended right after the previous one. Call it only when nothing in the loop can
        run, or when the loop has been busy for long: then the search waits for nothing of the
        model.
        """
        if self._due is None or self._loop.time() < self._due or self.task.done():
            return False
        self._due = self._loop.time() + _AGAIN
        self._loop.call_later(_AGAIN, lambda: None)  # so that the loop looks again
        self._raises = self.search.stopped
        self.task.cancel()
        return True

    def end_abandoned(self) -> bool:
        """End a search that keeps making calls despite every error; its task stays suspended."""
        if not self.search.is_abandoned or self._is_over:
            return False
        reached = self.search.budget.describe_exceeded(self.search.usage)
        reason = self.search.stopped or reached or "the search was given up"
        self._end(None, BudgetIgnored(str(reason)))
        return True

    async def _run(self, fn: SearchFn) -> None:
        returned: object = None
        failure: BaseException | None = None
        try:
            returned = await self._await_interruptible(_call(fn, self.search))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit) and not self._loop.ending:
                raise
            failure = error  # it goes into the result, and other searches continue
            failure.__traceback__ = _outside(error.__traceback__)
        self._end(returned, failure)

    def _end(self, returned: object, failure: BaseException | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._stopped_by = self.search.stopped.by if self.search.stopped else None
        self.search.close()  # before the result, because closing counts calls nobody waited for
        self._on_end(self._result(returned, failure))

    def _result(self, returned: object, failure: BaseException | None) -> SearchResult:
        try:
            result = SearchResult.of(self.search, returned, failure)
        except Exception as error:  # the search stored something at a node that has no record form
            for node in self.search.nodes():
                node.forget()
            result = SearchResult.of(self.search, None, error)
        by = result.stopped_by  # CLOSED if nothing else has ended the search
        if by is not StopReason.FAILED:
            by = self._stopped_by or (None if by is StopReason.CLOSED else by)
        return replace(result, stopped_by=by)

    @types.coroutine
    def _await_interruptible(
        self, call: Coroutine[Any, Any, object]
    ) -> Generator[Any, Any, object]:
        """Await a call, in which `end_wait` raises BudgetReached."""
        go_on: Callable[[], Any] = partial(call.send, None)
        while True:
            try:
                awaited = go_on()
            except StopIteration as end:
                return end.value
            error: BaseException | None = None
            try:
                value = yield awaited
            except BaseException as thrown:
                error = thrown
            if (ending := self._raises) is not None:
                self._raises = None
                self.task.uncancel()
                if isinstance(error, asyncio.CancelledError):
                    error = BudgetReached(str(ending), ending.by)
            go_on = partial(call.send, value) if error is None else partial(call.throw, error)


def resume_any(loop: IdleLoop, running: set[RunningSearch], *, busy: bool) -> bool:
    """Let a search of a loop go on in which nothing can run; return whether one can.

    Args:
        loop: The event loop.
        running: Its searches; abandoned ones are removed.
        busy: Whether the model has other work.
    """
    if any(one.end_wait() for one in running):
        return True
    running -= {one for one in running if one.end_abandoned()}
    if sum(one.search.return_next() for one in running):  # one call of each
        return True
    return loop.aside.resume_searches(busy=busy)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts in the search function, or its last entry otherwise."""
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


async def _call(fn: SearchFn, search: Search) -> object:
    return await fn(search.root)
