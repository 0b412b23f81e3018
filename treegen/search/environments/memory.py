"""Environments of objects in memory: games, puzzles and text worlds."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable

from treegen.errors import InputError, WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation, Traits

T = TypeVar("T")


@runtime_checkable
class WorldObject(Protocol):
    """An object that is a world. All methods but `run` are optional.

    fork: Returns an independent copy; without it treegen calls `copy.deepcopy`.
    observe: Returns what the state shows, as `run` does; without it the text is "".
    close: Frees what the object holds.
    """

    def run(self, action: ToolCall) -> Observation | str:
        """Run an action and return what it shows; a text is an observation without a reward."""
        ...


class MemoryEnvironment:
    """An environment whose worlds are Python objects. Their methods run in threads.

        environment = MemoryEnvironment(lambda problem: Maze(problem.metadata["map"]), TOOLS)

    Forks are as independent as the copies of the objects: `copy.deepcopy` does not copy modules,
    classes, open files and what the object reaches by global names.

    Attributes:
        traits: What it can do.
        tools: The tools of its worlds.
    """

    def __init__(
        self,
        make: Callable[[Any], WorldObject],
        tools: Sequence[dict[str, Any]],
        *,
        pure_tools: Collection[str] = (),
    ) -> None:
        """Create an environment without worlds.

        Args:
            make: Returns a new object for a problem; see `WorldObject`.
            tools: The tools of its worlds, as JSON schemas in OpenAI's format of function tools.
            pure_tools: Names of tools that change nothing and whose result follows from the state.
        """
        if not callable(make):
            raise InputError(f"make must be a function of a problem, got {make!r:.80}")
        names = [tool.get("function", tool).get("name") for tool in tools]
        if unknown := [name for name in pure_tools if name not in names]:
            raise InputError(f"pure_tools has {unknown[0]!r}, which is none of the tools {names}")
        self.tools, self._make = list(tools), make
        self.traits = Traits(forks_cheaply=True, pure_tools=frozenset(pure_tools))
        self._objects: dict[str, WorldObject] = {}
        self._worlds: set[_MemoryWorld] = set()
        self._numbers = count(1)

    async def start(self, problem: Any) -> _MemoryWorld:
        """Return a new world in the first state of a problem."""
        return self._world(await in_daemon(self._make, problem))

    async def restore(self, snapshot: str) -> _MemoryWorld:
        """Return a new world in the state of a snapshot."""
        if snapshot not in self._objects:
            raise InputError(f"there is no snapshot {snapshot!r}; it was deleted")
        return self._world(await in_daemon(_fork, self._objects[snapshot]))

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot; unknown ids do nothing."""
        if (stored := self._objects.pop(snapshot, None)) is not None:
            await _close(stored)

    async def close(self) -> None:
        """Close all worlds and delete all snapshots."""
        for world in list(self._worlds):
            await world.close()
        for snapshot in list(self._objects):
            await self.delete(snapshot)

    def _world(self, state: WorldObject) -> _MemoryWorld:
        if not callable(getattr(state, "run", None)):
            raise WorldError(f"make returned {state!r:.80}, which has no method run(action)")
        world = _MemoryWorld(self, state)
        self._worlds.add(world)
        return world

    def _store(self, state: WorldObject) -> str:
        name = f"memory-{next(self._numbers)}"
        self._objects[name] = state
        return name


class _MemoryWorld:
    """One live object."""

    def __init__(self, environment: MemoryEnvironment, state: WorldObject) -> None:
        self._environment = environment
        self._state: WorldObject | None = state

    async def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows."""
        return _observation(await in_daemon(self._live().run, action))

    async def observe(self) -> Observation:
        """Return the observation of the state."""
        observe = getattr(self._live(), "observe", None)
        return Observation() if observe is None else _observation(await in_daemon(observe))

    async def snapshot(self) -> str:
        """Store a copy of the object and return its id."""
        return self._environment._store(await in_daemon(_fork, self._live()))

    async def close(self) -> None:
        """Close the object; a second call does nothing."""
        self._environment._worlds.discard(self)
        if (state := self._state) is not None:
            self._state = None
            await _close(state)

    def _live(self) -> WorldObject:
        if self._state is None:
            raise InputError("this world is closed; start or restore another one")
        return self._state


def _fork(state: WorldObject) -> WorldObject:
    fork = getattr(state, "fork", None)
    copied: WorldObject = copy.deepcopy(state) if fork is None else fork()
    if copied is state:
        raise WorldError(f"{type(state).__name__} returned itself as its copy; copy its state")
    return copied


async def _close(state: WorldObject) -> None:
    if callable(close := getattr(state, "close", None)):
        await in_daemon(close)


def _observation(shown: Any) -> Observation:
    return Observation(text=shown) if isinstance(shown, str) else shown


async def in_daemon(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of its own, which does not keep the process alive.

    A coroutine that the function returns is awaited in the running loop.

    Args:
        function: The function.
        *args: Its arguments.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # a future cannot have it, or it would end the loop
            future.set_exception(WorldError(f"{type(error).__name__}: {error}".rstrip(": ")))

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = function(*args), None
        except BaseException as error:
            outcome = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="treegen-world", daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result
