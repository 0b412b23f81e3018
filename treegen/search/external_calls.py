"""Calls that searches await outside the sampling model: functions in threads, and other models.

None of them blocks other searches. A search resumes with their results only when none of its
samples or scores is pending and all its external results have arrived. It then gets the results in
the order of their nodes. So a tree does not depend on how long a function took, or on what was
computed at the same time.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from treegen.errors import InputError

WalkKey = tuple[tuple[int, int], ...]
"""Sorts the nodes of a tree in the order of `SearchNode.walk`."""

_THREADS: Final = 32
_WAIT_SECONDS: Final = 0.0002

T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")


class SearchLike(Protocol):
    """What external calls need of a search; `BudgetedSearch` is in a module above this one."""

    num_pending_calls: int
    """Its pending calls of the model."""


class NodeLike(Protocol):
    """What external calls need of a node; `SearchNode` is in a module above this one."""

    search: Any
    order: tuple[int, int]

    @property
    def path(self) -> Sequence[NodeLike]:
        """Nodes from the root to this one."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """An external call of a search."""

    work: asyncio.Future[Any]
    """The result to come."""
    turn: asyncio.Future[None]
    """Done when the search may resume with the result."""
    walk_key: WalkKey
    """Walk key of the node that the call is about."""
    is_new: bool
    """Whether it is a function that has not delayed a pass of the model yet."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Calls of a `BatchedFunction` that are not computed yet."""

    calls: list[tuple[Sequence[Any], asyncio.Future[Any]]] = field(default_factory=list)
    num_checks: int = 0
    """How often treegen checked whether to compute them."""


class ExternalCallQueue:
    """The external calls of the searches of one event loop."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._calls: dict[SearchLike, list[_Call]] = {}
        self._batches: dict[BatchedFunction[Any, Any], _Batch] = {}
        self.threads = Threads(_THREADS)

    def close(self) -> None:
        """Start no more functions in threads; those that run finish by themselves."""
        self.threads.close()

    def resume_searches(self, *, busy: bool) -> bool:
        """Compute batches that are due, and resume searches; return whether any search resumes.

        Call it when nothing in the loop can run.

        Args:
            busy: Whether the model has work.
        """
        for function, batch in list(self._batches.items()):
            batch.num_checks += 1
            num_items = sum(len(items) for items, _ in batch.calls)
            if not busy or num_items >= function.size or batch.num_checks > function.patience:
                del self._batches[function]
                function.compute_calls(batch.calls)
        ready = [
            search
            for search, calls in self._calls.items()
            if not search.num_pending_calls and all(call.work.done() for call in calls)
        ]
        for search in ready:
            for call in sorted(self._calls.pop(search), key=lambda call: call.walk_key):
                if not call.turn.done():
                    call.turn.set_result(None)
        return bool(ready) or (busy and self._wait_for_more())

    def _wait_for_more(self) -> bool:
        """Wait a moment for new functions, so that quick ones do not cost their searches a pass."""
        new = [
            call
            for search, calls in self._calls.items()
            if not search.num_pending_calls
            for call in calls
            if call.is_new and not call.work.done()
        ]
        for call in new:
            call.is_new = False
        if new:
            time.sleep(_WAIT_SECONDS)
        return bool(new)

    async def run_call(
        self, search: SearchLike, work: asyncio.Future[T], walk_key: WalkKey, *, is_function: bool
    ) -> T:
        """Return the result of `work`, once nothing else of the search is pending.

        Args:
            search: The search that waits.
            work: The result to come.
            walk_key: Walk key of the node that the call is about. Parts of a search resume in the
                order of their walk keys; those with equal keys in the order of their calls.
            is_function: Whether the work runs in a thread, rather than in a batch of the loop.
        """
        call = _Call(work, asyncio.get_running_loop().create_future(), walk_key, is_function)
        self._calls.setdefault(search, []).append(call)
        try:
            await call.turn
        finally:
            if call in (calls := self._calls.get(search, [])):  # the call was cancelled
                calls.remove(call)
                if not calls:
                    del self._calls[search]
            if not work.cancel() and not work.cancelled():
                work.exception()  # mark the error as retrieved, because nobody may read it
        return work.result()

    def add(self, function: BatchedFunction[X, Y], items: Sequence[X]) -> asyncio.Future[list[Y]]:
        """Add items to the batch that a function computes for several searches.

        Args:
            function: The function.
            items: Items of one search.

        Returns:
            A future of the items' results.
        """
        future: asyncio.Future[list[Y]] = asyncio.get_running_loop().create_future()
        self._batches.setdefault(function, _Batch()).calls.append((items, future))
        return future


class BatchedFunction(Generic[X, Y]):
    """A function of many items that is called for the items of many searches at once.

        judge = BatchedFunction(score_texts)
        values = await judge(node, texts)

    compute: gets items and returns one result per item, each a function of its own item only. It
    runs in the searches' own thread, so that it does not disturb what the model computes.

    Attributes:
        size: Number of items that is worth a call while the model has other work.
        patience: Number of passes of the model after which fewer items are computed too.
    """

    def __init__(
        self, compute: Callable[[list[X]], Sequence[Y]], *, size: int = 64, patience: int = 8
    ) -> None:
        """Create the function.

        Args:
            compute: Returns one result per item.
            size: Number of items that is worth a call while the model has other work.
            patience: Number of passes of the model after which fewer items are computed too.
        """
        self._compute, self.size, self.patience = compute, size, patience

    async def __call__(self, node: NodeLike, items: Sequence[X]) -> list[Y]:
        """Return the results of items that the search of a node asks for.

        If `compute` fails, each search's items are computed separately, and only those that fail
        raise.
        """
        queue = _get_call_queue()
        if not items:
            return []
        if queue is None:  # not in a loop of searches, so there is nothing to batch with
            return self._compute_items(items)
        future = queue.add(self, items)
        return await queue.run_call(node.search, future, walk_key_of(node), is_function=False)

    def compute_calls(self, calls: Sequence[tuple[Sequence[X], asyncio.Future[list[Y]]]]) -> None:
        """Compute the items of calls in one batch, and set the results or errors of their futures.

        Args:
            calls: The items of each call, and the future of their results.
        """
        open_calls = [(items, future) for items, future in calls if not future.done()]
        if not open_calls:
            return
        try:
            results = iter(self._compute_items([item for items, _ in open_calls for item in items]))
        except Exception as error:
            if len(open_calls) == 1:
                open_calls[0][1].set_exception(error)
                return
            for call in open_calls:
                self.compute_calls([call])
            return
        for items, future in open_calls:
            future.set_result([next(results) for _ in items])

    def _compute_items(self, items: Sequence[X]) -> list[Y]:
        results = list(self._compute(list(items)))
        if len(results) != len(items):
            raise InputError(
                f"the function returned {len(results)} results for {len(items)} items; return one "
                "result for each item, in order"
            )
        return results


class Threads:
    """A thread pool that is created on first use; pickling copies only its size."""

    def __init__(self, num: int) -> None:
        """Create a pool of at most `num` threads."""
        self._num = num
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self) -> Executor:
        """Return the pool."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num, thread_name_prefix="treegen-reward")
        return self._pool

    def close(self) -> None:
        """Start no more calls in the pool."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def __reduce__(self) -> tuple[type[Threads], tuple[int]]:
        return Threads, (self._num,)


async def in_thread(
    node: NodeLike, function: Callable[..., T], *args: Any, threads: Executor | None = None
) -> T:
    """Call a function about a node in a thread while other searches run; return its result.

    Args:
        node: The node that the call is about.
        function: The function to call.
        *args: Its arguments.
        threads: Executor to run it in; by default one of 32 threads of the run.
    """
    loop = running_loop()
    if loop is None:  # a session drives the coroutine, and nothing else could run meanwhile
        return function(*args)
    call = partial(contextvars.copy_context().run, function, *args)
    queue = _get_call_queue()
    if queue is None:
        return await loop.run_in_executor(threads, call)
    work = loop.run_in_executor(threads or queue.threads(), call)
    return await queue.run_call(node.search, work, walk_key_of(node), is_function=True)


async def await_external(node: NodeLike, futures: Sequence[ConcurrentFuture[T]]) -> list[T]:
    """Return the results of work of other threads about a node, in order, once all have arrived.

    The work is not cancelled with the code that awaits it.

    Args:
        node: The node that the work is about.
        futures: The results to come.
    """
    if not futures:
        return []
    if running_loop() is None:  # a session drives the coroutine, and nothing else could run
        return [future.result() for future in futures]
    work = asyncio.gather(*(asyncio.shield(asyncio.wrap_future(future)) for future in futures))
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may read it
    queue = _get_call_queue()
    if queue is None:
        return await work
    return await queue.run_call(node.search, work, walk_key_of(node), is_function=True)


def walk_key_of(node: NodeLike) -> WalkKey:
    """Return a key that sorts the nodes of a tree in the order of `SearchNode.walk`."""
    return tuple(above.order for above in node.path)


def _get_call_queue() -> ExternalCallQueue | None:
    """Return the external calls of the running loop of searches; None outside such a loop."""
    return getattr(running_loop(), "external_calls", None)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
