"""Event loops that tell when all their coroutines wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from treegen.errors import InputError
from treegen.search.aside import Aside
from treegen.search.budget import BudgetReached


class _IdleSelector(selectors.DefaultSelector):
    """A selector that notices when its event loop has nothing left to run."""

    def __init__(self, on_idle: Callable[[], bool]) -> None:
        super().__init__()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0 and self._on_idle():
            timeout = 0
        return super().select(timeout)


class IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that calls `on_idle` whenever it would wait. It does not wait if that is true.

    `on_idle` returns false if coroutines wait for something that the loop itself knows of, such as
    the network or a timer.

    backend: computes the samples that are awaited in the loop.
    aside: what is awaited beside them.
    """

    def __init__(self, on_idle: Callable[[], bool], backend: object) -> None:
        """A loop in which nothing runs yet."""
        super().__init__(_IdleSelector(on_idle))
        self.backend, self.aside = backend, Aside()


_driven: ContextVar[object] = ContextVar("_driven", default=None)


@contextmanager
def driven(backend: object) -> Iterator[None]:
    """Inside, the code that runs a coroutine also computes what it awaits of the backend."""
    token = _driven.set(backend)
    try:
        yield
    finally:
        _driven.reset(token)


def check_loop(backend: object) -> None:
    """Raise InputError if nothing would ever compute what is awaited of a backend."""
    if _driven.get() is backend:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if isinstance(loop, IdleLoop) and loop.backend is not backend:
        raise InputError(
            "a search awaits a node of another session or run, which computes nothing meanwhile; "
            "call `sample` and `score` of that session instead, which do not need to be awaited"
        )


def run_apart(run: Callable[[], object]) -> None:
    """Run an event loop, in a thread of its own if a loop runs already, as in a notebook."""
    if _has_running_loop():
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run).result()
    else:
        run()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks of a loop, wait for their ends, and close it."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()  # before the loop runs, so that none begins meanwhile
    try:
        run_apart(lambda: loop.run_until_complete(_ends(tasks)))
    finally:
        loop.close()


async def _ends(tasks: Iterable[asyncio.Task[object]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    if isinstance(loop, IdleLoop):
        loop.aside.close()
    await loop.shutdown_default_executor()


T = TypeVar("T")


async def gather(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Run parts of a search side by side and return what they return, in order.

    Unlike with asyncio.gather, nothing outlives the call. If one part fails, the others are
    cancelled. A reached budget is not the failure of one part: it ends what each of them waits for.
    So all parts come to their own ends, and what they have drawn is in the tree. Then BudgetReached
    is raised here.
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
        # It awaits all tasks, so that asyncio reports no second failure as never retrieved.
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _out_of_budget(task: asyncio.Future[T]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), BudgetReached)
