"""Time limits of calls of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from treegen.errors import WorldError

T = TypeVar("T")

MAX_SECONDS: Final = 300.0
"""Longest time of one call of an environment, by default."""


async def limit_time(call: Awaitable[T], what: str, seconds: float) -> T:
    """Return the result of a call of an environment.

    Args:
        call: The call.
        what: What it does, for the message.
        seconds: Seconds after which it is cancelled.

    Raises:
        WorldError: It took too long, or it would end the event loop.
    """

    async def await_call() -> T:
        try:
            return await call
        except (SystemExit, KeyboardInterrupt) as error:
            raise WorldError(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    try:
        return await asyncio.wait_for(await_call(), seconds)
    except TimeoutError as error:
        raise WorldError(f"{what} took more than {seconds:g} seconds") from error
