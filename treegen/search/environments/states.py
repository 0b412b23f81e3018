"""States of worlds, outcomes and time limits of calls, and the usage of an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from treegen.errors import WorldError
from treegen.search.environments.protocol import Observation, World


@dataclass(slots=True, eq=False)
class WorldState:
    """A state of a world, for nodes to act from; only the loop of its `LiveWorlds` changes it."""

    world: World | None = None
    """A live world in this state; None if there is none."""
    snapshot: str | None = None
    """The id of a snapshot of the state; None if there is none."""
    failure: str = ""
    """Why the state is lost; "" if it is not."""
    is_released: bool = False
    """Whether nothing will act from it any more."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its world is used."""
    num_users: int = 0
    """Coroutines that hold the lock or wait for it."""
    observation: Observation | None = None
    """What `World.observe` has returned; None if it was not called."""
    pure: dict[str, Observation] = field(default_factory=dict)
    """The observations of pure calls, by `call_key`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the calls of one reply."""

    observations: tuple[Observation, ...]
    """One for each call that ended, in order."""
    state: WorldState | None = None
    """The state after them; None if the episode is over."""
    failure: str = ""
    """Why the branch ends here by a failure; "" if there was none."""
    reward: float | None = None
    """The world's last judgement; None if it has none."""
    num_run: int = 0
    """Actions that were run."""
    num_calls: int = 0
    """Calls that ended or failed, also those that shared the run of an equal pure call."""


@dataclass(slots=True)
class WorldUsage:
    """Counts of what an environment has done for all searches."""

    started: int = 0
    """Worlds started for problems."""
    restored: int = 0
    """Worlds restored from snapshots."""
    snapshots: int = 0
    """Snapshots made."""
    most_live: int = 0
    """Most worlds that were live at once."""
    live: int = 0
    """Worlds that are live."""
    stored: int = 0
    """Snapshots that exist."""


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
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise WorldError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except TimeoutError as error:
        if not limit.expired():  # an error of the environment itself
            raise
        raise WorldError(f"{what} took more than {seconds:g} seconds") from error
