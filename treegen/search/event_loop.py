"""Event loops that notice when all their coroutines wait."""

from __future__ import annotations

import asyncio
import ctypes
import selectors
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from treegen.common.lifetimes import use_context_value
from treegen.errors import InputError
from treegen.search.budget import BudgetIgnored, BudgetReached
from treegen.search.external_calls import ExternalCallQueue, running_loop

T = TypeVar("T")

_BUSY_ROUNDS: Final = 1000
"""Busy rounds of an event loop after which `on_busy` is called."""


_STUCK_SECONDS: Final = 1.0
"""Seconds to wait for tasks to end while another task never ends."""


class _IdleSelector(selectors.DefaultSelector):
    """A selector that notices when its event loop has nothing left to run."""

    def __init__(self, on_idle: Callable[[], object], on_busy: Callable[[], object]) -> None:
        super().__init__()
        self._on_idle, self._on_busy = on_idle, on_busy
        self._num_busy = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._num_busy = self._num_busy + 1 if timeout == 0 else 0
        if self._num_busy == _BUSY_ROUNDS:
            self._num_busy = 0
            self._on_busy()
        elif timeout != 0 and self._on_idle():
            timeout = 0
        return super().select(timeout)


def keep_suspended(abandoned: object) -> None:
    """Keep a coroutine or task that ignores every error until the process ends.

    Freeing it raises GeneratorExit in it, and while the interpreter exits, all that it calls fails
    at once. So a loop that ignores errors would never end. A reference in a module is too short,
    because the interpreter clears modules when it exits.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(abandoned))


async def suspend_forever() -> None:
    """Suspend the awaiting task for good, because no exception ends it."""
    loop = running_loop()
    if loop is None:  # `Session.step` drives the coroutine
        await _YieldForever()
        return
    task = asyncio.current_task()
    if isinstance(loop, IdleLoop) and task is not None and task not in loop.stuck_tasks:
        loop.stuck_tasks.add(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        keep_suspended(task)
    await loop.create_future()


class _YieldForever:
    def __await__(self) -> Generator[None, None, None]:
        while True:
            yield


class IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that calls `on_idle` whenever it would wait, and waits only if that is false.

    `on_idle` returns false if coroutines wait for something that the loop itself knows of, such as
    the network or a timer.

    `on_busy` is called if the loop has not waited for a thousand rounds. Some coroutine then polls
    for a result, which must not block the computation of that result.

    Attributes:
        backend: Computes the samples that are awaited in the loop.
        stuck_tasks: Tasks that nothing ends.
        external_calls: The external calls of its searches.
        ending: Whether all tasks are being cancelled.
    """

    def __init__(
        self, on_idle: Callable[[], object], on_busy: Callable[[], object], backend: object
    ) -> None:
        """Create a loop in which nothing runs yet.

        Args:
            on_idle: Called when the loop would wait; returns whether it must not.
            on_busy: Called when the loop has not waited for long.
            backend: Computes the samples that are awaited in the loop.
        """
        super().__init__(_IdleSelector(on_idle, on_busy))
        self.backend, self.external_calls, self.ending = backend, ExternalCallQueue(), False
        self.stuck_tasks: set[asyncio.Task[Any]] = set()
        _loops[id(backend)] = self  # the loop keeps the backend alive, so its id stays unique

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that nobody awaited, unless it is the end of a search or of the program.

        Tasks that a search leaves behind end with BudgetReached or BudgetIgnored. Errors that end
        the program were raised already.
        """
        expected = BudgetReached | BudgetIgnored | KeyboardInterrupt | SystemExit
        if not isinstance(context.get("exception"), expected):
            super().default_exception_handler(context)


_loops: WeakValueDictionary[int, IdleLoop] = WeakValueDictionary()
"""Loops by the ids of their backends."""
_stepped: WeakValueDictionary[int, object] = WeakValueDictionary()
"""Backends of sessions, which compute only when the session is called, by their ids."""

_driven: ContextVar[object] = ContextVar("_driven", default=None)


def add_session(backend: object) -> None:
    """Declare that a backend computes only when its session is called."""
    _stepped[id(backend)] = backend


def drive_backend(backend: object) -> AbstractContextManager[None]:
    """Declare that the code inside, which runs a coroutine, also computes what it awaits.

    Args:
        backend: The backend that computes it.
    """
    return use_context_value(_driven, backend)


def check_loop(backend: object) -> None:
    """Raise InputError if nothing would ever compute what is awaited from a backend."""
    loop = running_loop()
    if loop is None or _driven.get() is backend:
        return
    own_loop = _loops.get(id(backend))
    if id(backend) in _stepped and not isinstance(loop, IdleLoop):
        raise InputError(
            "a node of a session cannot be awaited, because the session computes only when it is "
            "called; use session.sample({node: n}) or session.score({node: texts}) without await, "
            "or pass the call to session.start and call session.step until it is done"
        )
    if own_loop is not None and own_loop is not loop and not isinstance(loop, IdleLoop):
        raise InputError(
            "a node is awaited outside of the event loop of its search, for example in a "
            "thread; await the node in the search function, or in a task of the search's event "
            "loop"
        )
    if isinstance(loop, IdleLoop) and loop.backend is not backend:
        raise InputError(
            "a search cannot await a node of another session or run, because the other session "
            "does not compute while the search waits; call `sample` and `score` of the other "
            "session without await"
        )


def run_outside_loop(run: Callable[[], T]) -> T:
    """Return the result of a function that runs an event loop.

    If a loop already runs, as in a notebook, the function is called in a separate thread.
    """
    if running_loop() is None:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def end_loop(loop: IdleLoop) -> None:
    """Cancel all tasks of a loop, wait for their ends, and close it."""
    loop.ending = True
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()  # before the loop runs, so that no task starts
    try:
        run_outside_loop(lambda: loop.run_until_complete(_ends(loop, tasks)))
    finally:
        loop.close()


async def _ends(loop: IdleLoop, tasks: Iterable[asyncio.Task[object]]) -> None:
    waiting = set(tasks)
    while waiting - loop.stuck_tasks:
        _, waiting = await asyncio.wait(
            waiting, timeout=_STUCK_SECONDS if loop.stuck_tasks else None
        )
        if loop.stuck_tasks and waiting:
            break  # they may wait for a task that never ends
    await loop.shutdown_asyncgens()
    loop.external_calls.close()
    await loop.shutdown_default_executor()


async def gather(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Run parts of a search concurrently and return their results, in order.

    Unlike with asyncio.gather, no part outlives the call. If one part fails, the others are
    cancelled. A reached budget is not the failure of one part: it ends the pending calls of all
    parts. So all parts end by themselves, and what they have drawn is in the tree. Then
    BudgetReached is raised here.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task in done and not _out_of_budget(task):
                    task.result()
    finally:
        for task in waiting:
            task.cancel()
        # Await all tasks, so that asyncio does not report a second failure as never retrieved.
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _out_of_budget(task: asyncio.Future[T]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), BudgetReached)
