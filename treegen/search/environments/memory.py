"""Environments of objects in memory: games, puzzles and text worlds, and a base class of games."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack, suppress
from itertools import count
from typing import Any, ClassVar, Final, Protocol, TypeVar, runtime_checkable

from treegen.common.synchronization import run_in_daemon
from treegen.errors import InputError, StoppedError, WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation, Traits

T = TypeVar("T")

# asyncio turns a CancelledError of concurrent.futures into its own, which ends the awaiting task.
_NOT_IN_FUTURES: Final = (StopIteration, CancelledError)


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
            raise InputError(
                f"pure_tools must contain only names of tools, got {unknown[0]!r}; the tools "
                f"are {names}"
            )
        self.tools, self._make = list(tools), make
        self.traits = Traits(forks_cheaply=True, pure_tools=frozenset(pure_tools))
        self._objects: dict[str, _Object] = {}
        self._worlds: set[_MemoryWorld] = set()
        self._numbers = count(1)
        self._is_closed = False

    async def start(self, problem: Any) -> _MemoryWorld:
        """Return a new world in the first state of a problem."""
        self._check_open()
        return await self._add(await _make_object(self._make, problem))

    async def restore(self, snapshot: str) -> _MemoryWorld:
        """Return a new world in the state of a snapshot."""
        self._check_open()
        if snapshot not in self._objects:
            raise InputError(f"there is no snapshot {snapshot!r}; it was deleted")
        return await self._add(await self._objects[snapshot].fork())

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot; unknown ids do nothing."""
        if (stored := self._objects.pop(snapshot, None)) is not None:
            await stored.close()

    async def close(self) -> None:
        """Close all worlds and delete all snapshots."""
        self._is_closed = True
        async with AsyncExitStack() as stack:  # each step runs, also if another one fails
            for snapshot in list(self._objects):
                stack.push_async_callback(self.delete, snapshot)
            for world in list(self._worlds):
                stack.push_async_callback(world.close)

    async def _add(self, state: _Object) -> _MemoryWorld:
        await self._keep(state)
        world = _MemoryWorld(self, state)
        self._worlds.add(world)
        return world

    async def _store(self, state: _Object) -> str:
        await self._keep(state)
        name = f"memory-{next(self._numbers)}"
        self._objects[name] = state
        return name

    async def _keep(self, state: _Object) -> None:
        """Close a new object if the environment was closed while it was made."""
        if self._is_closed:
            await state.close()
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoppedError("the environment is closed; create a new one")


class _MemoryWorld:
    """One live object."""

    def __init__(self, environment: MemoryEnvironment, state: _Object) -> None:
        self._environment, self._state = environment, state

    async def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows."""
        return _observation(await self._state.call(self._state.value.run, action))

    async def observe(self) -> Observation:
        """Return the observation of the state."""
        observe = getattr(self._state.value, "observe", Observation)
        return _observation(await self._state.call(observe))

    async def snapshot(self) -> str:
        """Store a copy of the object and return its id."""
        return await self._environment._store(await self._state.fork())

    async def close(self) -> None:
        """Close the object, once a call that still runs has ended; a second call does nothing."""
        self._environment._worlds.discard(self)
        await self._state.close()


class _Object:
    """An object whose methods run one at a time, also if the caller was cancelled meanwhile."""

    def __init__(self, value: WorldObject) -> None:
        if not callable(getattr(value, "run", None)):
            raise WorldError(
                f"make must return an object with a method run(action), got {value!r:.80}"
            )
        self.value = value
        self._lock = threading.Lock()
        self._is_closed = False

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a method of the object, or a function of it, in a thread."""
        self._check_open()
        return await in_daemon(self._call_locked, function, *args)

    async def fork(self) -> _Object:
        """Return an independent copy of the object."""
        self._check_open()
        return await _make_object(self._call_locked, _fork, self.value)

    async def close(self) -> None:
        """Close the object; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if callable(close := getattr(self.value, "close", None)):
            if self._lock.locked():  # a cancelled call still runs, for any time
                threading.Thread(target=self._call_locked, args=(close,), daemon=True).start()
            else:
                await in_daemon(self._call_locked, close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoppedError("this world is closed; start or restore another world")

    def _call_locked(self, function: Callable[..., T], *args: Any) -> T:
        with self._lock:
            return function(*args)


async def _make_object(make: Callable[..., Any], *args: Any) -> _Object:
    """Return the object that a function makes in a thread.

    If the caller is cancelled, the thread goes on, and the object is closed once it is made.

    Args:
        make: The function.
        *args: Its arguments.
    """
    lock, made = threading.Lock(), list[Any]()
    is_cancelled = False

    def work() -> Any:
        value = make(*args)
        if inspect.isawaitable(value):  # it is cancelled with the caller
            return value
        with lock:
            made.append(value)
            is_late = is_cancelled
        if is_late:
            _close_unused(value)
        return value

    try:
        return _Object(await in_daemon(work))
    except asyncio.CancelledError:
        with lock:
            is_cancelled = True
            unused = list(made)
        for value in unused:
            threading.Thread(target=_close_unused, args=(value,), daemon=True).start()
        raise


def _close_unused(value: Any) -> None:
    """Close an object that nobody waits for, so nobody reads an error of it either."""

    async def finish(closing: Awaitable[Any]) -> None:
        await closing

    if callable(close := getattr(value, "close", None)):
        with suppress(Exception):
            closing = close()
            if inspect.isawaitable(closing):
                asyncio.run(finish(closing))


def _fork(state: WorldObject) -> WorldObject:
    fork = getattr(state, "fork", None)
    copied: WorldObject = copy.deepcopy(state) if fork is None else fork()
    if copied is state:
        raise WorldError(
            f"{type(state).__name__} returned the same object instead of a copy; return a copy of "
            "the object"
        )
    return copied


def _observation(value: Any) -> Observation:
    return Observation(text=value) if isinstance(value, str) else value


async def in_daemon(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread of its own, which does not keep the process alive.

    A coroutine that the function returns is awaited in the running loop.

    Args:
        function: The function.
        *args: Its arguments.
    """

    def work() -> T:
        try:
            return function(*args)
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, _NOT_IN_FUTURES):
                raise
            # A future cannot have the error, or the error would end the event loop or the search.
            raise WorldError(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    result = await asyncio.wrap_future(run_in_daemon("treegen-world", work))
    return await result if inspect.isawaitable(result) else result


class MoveError(Exception):
    """A move is impossible; the message is for the model."""


class ToolGame(ABC):
    """A world in memory. The tool NAME is the method `do_NAME`, which returns a text.

    The method raises `MoveError` if the move is impossible. `copy.deepcopy` forks the game.
    """

    tools: ClassVar[Sequence[dict[str, Any]]]
    """The tools, as JSON schemas in OpenAI's format."""
    pure_tools: ClassVar[frozenset[str]]
    """Tools that change nothing."""

    @property
    @abstractmethod
    def reward(self) -> float:
        """The game's judgement of its state, from 0 to 1."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the episode is over."""

    @abstractmethod
    def describe(self) -> str:
        """Return the text of the state for the model."""

    def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows; a wrong action is an observation."""
        if self.is_done:
            return self._show("The episode is over.")
        wrong = self._explain_wrong(action)
        if wrong is None:
            try:
                return self._show(getattr(self, f"do_{action.name}")(**action.arguments))
            except MoveError as error:
                wrong = str(error)
        return self._show(wrong)

    def observe(self) -> Observation:
        """Return the observation of the state; nothing changes."""
        return self._show(self.describe())

    def _show(self, text: str) -> Observation:
        return Observation(text=text, reward=self.reward, is_done=self.is_done)

    def _explain_wrong(self, action: ToolCall) -> str | None:
        """Return what is wrong with the form of a call; None if nothing is."""
        names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if action.name not in names:
            return f"There is no tool {action.name!r}; use {', '.join(names)}."
        parameters = list(names[action.name]["properties"])
        if set(action.arguments) != set(parameters):
            passed = ", ".join(map(str, action.arguments)) or "none"
            return f"{action.name} takes {', '.join(parameters) or 'no arguments'}; got {passed}."
        for name, value in action.arguments.items():
            if not isinstance(value, str):
                return f"{name} must be a string, got {type(value).__name__}."
        return None
