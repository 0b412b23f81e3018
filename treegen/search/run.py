"""Runs hundreds of searches at once: all that wait for samples share every forward pass."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol

from treegen.common.lifetimes import CloseableRun, call_weakly
from treegen.common.outputs import LevelRows, Status, Usage, WorkerStatus
from treegen.common.params import SamplingParams
from treegen.common.synchronization import ExclusiveSection
from treegen.errors import InputError, StoppedError
from treegen.search.backend import Backend, Context
from treegen.search.budget import Budget, BudgetIgnored, BudgetReached, StopReason
from treegen.search.event_loop import IdleLoop, end_loop, run_outside_loop
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchProblem, SearchResult, warn_if_all_failed

_END_WAIT_SECONDS: Final = 0.1
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
        self._due = self._loop.time() + _END_WAIT_SECONDS
        self._loop.call_later(_END_WAIT_SECONDS, lambda: None)  # so that the loop looks again
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
            failure.__traceback__ = _trim_traceback(error.__traceback__)
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
        resume: Callable[[], Any] = partial(call.send, None)
        while True:
            try:
                awaited = resume()
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
            resume = partial(call.send, value) if error is None else partial(call.throw, error)


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
    return loop.external_calls.resume_searches(busy=busy)


def _trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts in the search function, or its last entry otherwise."""
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


async def _call(fn: SearchFn, search: Search) -> object:
    returned = fn(search.root)
    if not inspect.isawaitable(returned):
        raise InputError(
            "fn must be a function `async def fn(root)`, whose calls can be awaited; a call "
            f"returned {returned!r:.60}"
        )
    return await returned


class RunBackend(Backend, Protocol):
    """A backend that computes what all searches wait for, step by step."""

    @property
    def usage(self) -> Usage:
        """Usage so far, over all searches."""
        ...

    def status(self) -> Status:
        """Return the current load."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a requested result has not been computed."""
        ...

    def add_prompts(self, contents: Sequence[str | Sequence[int]], *, rows: int) -> list[Context]:
        """Return contexts of prompts known in advance, with `rows` rows expected below each."""
        ...

    def new_origin(self, context: Context, seed: int | None) -> str:
        """Return the origin of the seeds of a new unnamed search of a prompt."""
        ...

    def step(self) -> None:
        """Compute one pass."""
        ...

    def close(self) -> None:
        """End all searches and free their pages."""
        ...


class SearchResults(Iterator[SearchResult], CloseableRun):
    """Results of searches as they finish; closing it ends unfinished searches.

    Attributes:
        names: Names of the problems, in their order.
    """

    names: list[str]

    def in_order(self) -> list[SearchResult]:
        """Run all searches to their ends; return results in the order of the problems.

        Raises:
            StoppedError: another thread closed the run, such as with its Cluster.
        """
        with self:
            results = {result.name: result for result in self}
        if len(results) < len(self.names):
            raise StoppedError("the searches were closed before their ends; start them again")
        warn_if_all_failed(list(results.values()), stacklevel=4)
        return [results[name] for name in self.names]


class SearchRun(SearchResults):
    """Results of searches as they finish; closing it ends unfinished searches.

    A search that fails does not end the others: its result has the error and its tree so far.
    Errors of the model itself end the run.

    Attributes:
        names: Names of the problems, in their order.
        closed: Whether the run is over.
    """

    def __init__(
        self,
        backend: RunBackend,
        fn: SearchFn,
        problems: Sequence[SearchProblem],
        *,
        params: SamplingParams,
        concurrency: int,
        budget: Budget | None,
        rows: int,
        on_demand: bool = False,
    ) -> None:
        """Create a run; `LLM.search_stream` does this.

        Args:
            backend: Computes samples and scores.
            fn: The search: an async function of the root node of a problem.
            problems: The problems.
            params: Default sampling parameters.
            concurrency: Maximum number of searches that run at once.
            budget: Budget of each search.
            rows: Rows that each search is expected to decode at once.
            on_demand: Whether to start only those searches that `enqueue` names.
        """
        self.backend = backend
        self.names = [problem.name for problem in problems]
        self._fn, self._params, self._budget = fn, params, budget
        self._concurrency = concurrency
        contexts = backend.add_prompts([problem.content for problem in problems], rows=rows)
        self._entries = {
            problem.name: (
                problem,
                context,
                problem.origin
                or (None if problem.is_named else backend.new_origin(context, params.seed)),
            )
            for problem, context in zip(problems, contexts, strict=True)
        }
        self._waiting: deque[str] = deque()
        if not on_demand:
            self.enqueue(self.names)
        self._running: set[RunningSearch] = set()
        self._results: deque[SearchResult] = deque()
        # Only the caller keeps the run alive, so that dropping it closes it at once.
        self._loop = IdleLoop(call_weakly(self._on_idle), call_weakly(self._on_busy), backend)
        self.closed = False
        self._exclusive = ExclusiveSection("run")

    def status(self) -> Status:
        """Return the current load."""
        return self.backend.status()

    @property
    def usage(self) -> Usage:
        """Usage so far, over all searches."""
        return self.backend.usage

    def levels(self) -> tuple[LevelRows, ...]:
        """Return no attention levels, because they are not reported for searches."""
        return ()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return no workers, because one LLM runs all searches."""
        return ()

    @property
    def num_running(self) -> int:
        """Number of running searches."""
        return len(self._running)

    @property
    def num_unknown(self) -> int:
        """Number of searches that have started and whose results the iterator has not returned."""
        return self.num_running + len(self._results)

    def enqueue(self, names: Iterable[str]) -> None:
        """Start the searches of some problems, as soon as fewer than `concurrency` run."""
        self._waiting.extend(names)

    def take_back(self, max_names: int) -> list[str]:
        """Drop up to `max_names` waiting searches, the last first, and return their names."""
        return [self._waiting.pop() for _ in range(min(max_names, len(self._waiting)))]

    @property
    def has_work(self) -> bool:
        """Whether a search is unfinished, or its result was not returned."""
        return not self.closed and bool(self._waiting or self._running or self._results)

    def take_results(self) -> list[SearchResult]:
        """Return the results that were not returned yet."""
        results = list(self._results)
        self._results.clear()
        return results

    def __next__(self) -> SearchResult:
        while not self._results:
            if not self.has_work:
                self.close()
                raise StopIteration
            self.step()
        return self._results.popleft()

    def step(self) -> None:
        """Run all searches until they wait, then one forward pass over what they wait for.

        It is for a caller that checks something between passes. Results come from the iterator.

        Raises:
            InputError: Another thread is in a step, which is not disturbed.
        """
        with self._exclusive():
            self._step()

    def _step(self) -> None:
        try:
            while self._waiting and len(self._running) < self._concurrency:
                self._begin(*self._entries.pop(self._waiting.popleft()))
            run_outside_loop(self._loop.run_forever)
            if self.closed:  # a search has closed the run
                self.close()
            elif self.backend.has_work:
                self.backend.step()
        except BaseException:
            self.close()
            raise

    def _on_idle(self) -> bool:
        """Stop the loop for a forward pass, for a result, or for further searches."""
        if self.closed:
            return False
        if resume_any(self._loop, self._running, busy=self.backend.has_work):
            return True
        if self.backend.has_work or self._results or not self._running:
            self._loop.stop()
            return True
        return False  # all searches wait for something else, such as a tool

    def _on_busy(self) -> None:
        """Do what `_on_idle` does, and always stop the loop, so that the caller gets control."""
        if not self.closed:
            self._on_idle()
            self._loop.stop()

    def _begin(self, problem: SearchProblem, context: Context, origin: str | None) -> None:
        search = Search(
            self.backend,
            problem.content,
            name=problem.name,
            params=self._params,
            budget=self._budget,
            context=context,
            origin=origin,
        )
        running = RunningSearch(self._loop, self._fn, search, call_weakly(self._note))
        running.task.add_done_callback(partial(call_weakly(self._on_task_done), running))
        self._running.add(running)

    def _on_task_done(self, running: RunningSearch, task: asyncio.Task[None]) -> None:
        self._running.discard(running)
        if not task.cancelled():
            task.exception()  # such as Ctrl-C: `step` raises it, so keep asyncio from reporting it

    def _note(self, result: SearchResult) -> None:
        if not self.closed:
            self._results.append(result)

    def close(self) -> None:
        """End all searches; unfinished ones get no result."""
        self.closed = True
        self.backend.close()
        self._waiting.clear()
        self._entries.clear()
        if self._loop.is_running():  # a search closed the run, which ends when that search waits
            self._loop.stop()
        elif not self._loop.is_closed():
            end_loop(self._loop)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "closed") and not is_finalizing():
            self.close()
