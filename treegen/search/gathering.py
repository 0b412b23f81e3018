"""Waiting for several parts of one search at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from treegen.search.budget import BudgetReached

T = TypeVar("T")


async def gather(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Run parts of a search side by side and return what they return, in order.

    Nothing outlives the call, unlike with asyncio.gather. Where one part fails the others are
    cancelled. A reached budget is no failure of one part: it ends what each of them waits for, so
    all come to their own end, and what they drew by then is in the tree, before BudgetReached is
    raised here.
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
        # Of all of them, so that no second failure is reported as never retrieved.
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def _out_of_budget(task: asyncio.Future[T]) -> bool:
    return not task.cancelled() and isinstance(task.exception(), BudgetReached)
