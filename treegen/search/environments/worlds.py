"""The live worlds of an environment: at most so many, in an event loop of their own.

A `WorldState` is a live world, a snapshot, or both. A state that waits for the model keeps its
world while there is room. All coroutines run in one background thread, apart from the model.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from treegen.common.checks import check_int, check_number
from treegen.common.lifetimes import Closeable
from treegen.errors import InputError, WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import (
    Environment,
    Observation,
    World,
    call_key,
    check_images,
    check_observation,
    describe_failure,
)
from treegen.search.environments.replay import ReplayEnvironment
from treegen.search.environments.states import Outcome, WorldState, WorldUsage, limit_time

T = TypeVar("T")

_CLOSING_SECONDS: Final = 30.0
"""Longest time to wait for calls that still run when an environment is closed."""


class LiveWorlds(Closeable):
    """Runs the worlds of an environment.

    Attributes:
        environment: The environment; one without snapshots is forked by replay.
        usage: What it has done so far.
    """

    def __init__(self, environment: Environment, *, max_live: int, max_seconds: float) -> None:
        """Create an object without worlds.

        Args:
            environment: Starts and restores worlds.
            max_live: Maximum number of live worlds.
            max_seconds: Longest time of one call of the environment, such as an action.
        """
        check_int("max_live", max_live, minimum=1)
        check_number("max_seconds", max_seconds, above=0)
        has_snapshots = environment.traits.has_snapshots
        self.environment: Environment = (
            environment if has_snapshots else ReplayEnvironment(environment)
        )
        self.usage = WorldUsage()
        self._max_live, self._max_seconds = max_live, max_seconds
        self._pure = environment.traits.pure_tools
        self._states: set[WorldState] = set()  # all that may have a world or a snapshot
        self._idle: dict[WorldState, None] = {}  # states whose world nobody uses, oldest first
        self._waiting: list[asyncio.Future[None]] = []  # for room for a world
        self._calls: set[Future[Any]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="treegen-worlds", daemon=True
        )
        self._thread.start()

    # Calls from the threads of searches

    def start(self, problem: Any) -> Future[WorldState]:
        """Return a future of the first state of a problem."""
        return self._submit(self._start(problem))

    def run(
        self, state: Future[WorldState], calls: Sequence[ToolCall], *, is_last: bool
    ) -> Future[Outcome]:
        """Run calls in order from a state, which does not change; return a future of the outcome.

        Args:
            state: The state.
            calls: The calls; those after one that ends the episode do not run.
            is_last: Whether nothing else will act from the state, so that its world may go on.
        """
        return self._submit(self._run(state, tuple(calls), is_last))

    def observe(self, state: Future[WorldState]) -> Future[Observation]:
        """Return a future of the observation of a state; its `failure` says why there is none."""
        return self._submit(self._observe(state))

    def use(
        self, make: Callable[[], Awaitable[World]], use: Callable[[World], Awaitable[T]]
    ) -> Future[T]:
        """Return what a function returns for a world of its own, to come.

        Args:
            make: Opens the world.
            use: The function. It may change the world, which is closed afterwards.
        """

        async def use_once() -> T:
            world = await self._open(make)
            try:
                return await use(world)
            finally:
                await self._discard(world)

        return self._submit(use_once())

    def release(self, state: Future[WorldState]) -> None:
        """Close the world of a state and delete its snapshot, once the future has a result."""
        if not self._loop.is_closed():
            state.add_done_callback(self._on_released)
            state.cancel()

    def _on_released(self, state: Future[WorldState]) -> None:
        if state.cancelled() or state.exception() is not None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end_later, state.result())

    def cancel(self, outcome: Future[Outcome], state: Future[WorldState]) -> None:
        """Cancel calls, or release the state after them, which nothing will act from.

        Args:
            outcome: A future of their outcome.
            state: The state from which they run.
        """
        outcome.cancel()
        if outcome.cancelled() or outcome.exception() is not None or self._loop.is_closed():
            return
        after = outcome.result().state
        if after is not None and after is not state.result():
            self._loop.call_soon_threadsafe(self._end_later, after)

    def close(self) -> None:
        """Close all worlds, delete all snapshots, and close the environment."""
        if self._is_closed:
            return
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        try:
            asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            call.close()
            raise InputError("the agent is closed; create a new agent")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    # Coroutines of the loop

    async def _start(self, problem: Any) -> WorldState:
        world = await self._open(lambda: self.environment.start(problem))
        self.usage.started += 1
        return self._keep(world)

    async def _run(
        self, future: Future[WorldState], calls: tuple[ToolCall, ...], is_last: bool
    ) -> Outcome:
        try:
            state = await _await_shielded(future)
        except Exception as error:
            return Outcome((), failure=describe_failure(error))
        results: list[Observation] = []
        num_run = 0
        world: World | None = None
        try:
            for call in calls:
                if world is None and call.name in self._pure:
                    observation, is_new = await self._run_pure(state, call)
                    num_run += is_new
                else:
                    world = world or await self._fork(state, is_last)
                    num_run += 1
                    observation = await self._act(world, call)
                results.append(observation)
                if observation.is_done or observation.failure:
                    break
        except Exception as error:
            if world is not None:
                await self._discard(world)
            failure, num_calls = describe_failure(error), len(results) + 1
            return Outcome(tuple(results), failure=failure, num_run=num_run, num_calls=num_calls)
        except BaseException:
            if world is not None:
                self._discard_later(world)
            raise
        last = results[-1]
        after: WorldState | None = None
        reward, failure = last.reward, last.failure
        if not last.is_done and not failure:
            after = state if world is None else self._keep(world)
        elif reward is None and not failure:
            try:
                ended = await self._show(world) if world is not None else await self._look(state)
                reward, failure = ended.reward, ended.failure
            except Exception as error:
                failure = describe_failure(error)
        if after is None and world is not None:
            await self._discard(world)
        return Outcome(tuple(results), after, failure, reward, num_run, len(results))

    async def _run_pure(self, state: WorldState, call: ToolCall) -> tuple[Observation, bool]:
        """Return the observation of a call that changes nothing, and whether it had to run."""
        key = call_key(call)
        async with self._using(state):
            if key in state.pure:
                return state.pure[key], False
            world = await self._revive(state)
            try:
                observation = await self._act(world, call)
            except BaseException:
                await self._drop_world(state)
                raise
            self._set_idle(state, world)
            state.pure[key] = observation
            return observation, True

    async def _act(self, world: World, call: ToolCall) -> Observation:
        observation = await self._call(world.run(call), f"the action {call.name}")
        check_observation(observation)
        if observation.images:
            await asyncio.to_thread(check_images, observation)
        return observation

    async def _observe(self, future: Future[WorldState]) -> Observation:
        try:
            return await self._look(await _await_shielded(future))
        except Exception as error:
            return Observation(failure=describe_failure(error))

    async def _look(self, state: WorldState) -> Observation:
        """Return what a state shows."""
        async with self._using(state):
            if state.observation is None:
                world = await self._revive(state)
                try:
                    state.observation = await self._show(world)
                except BaseException:
                    await self._drop_world(state)
                    raise
                self._set_idle(state, world)
            return state.observation

    async def _show(self, world: World) -> Observation:
        observation = await self._call(world.observe(), "observing a world")
        check_observation(observation)
        return observation

    async def _fork(self, state: WorldState, is_last: bool) -> World:
        """Return a world in a state that the caller may change."""
        async with self._using(state):
            if state.world is None or not is_last:
                world = await self._revive(state)
                if state.snapshot is None:
                    try:
                        state.snapshot = await self._snapshot(world)
                    except BaseException:
                        await self._drop_world(state)
                        raise
            else:
                world = state.world
                self._idle.pop(state, None)
                state.failure = "its world went on"
            state.world = None
            return world

    async def _revive(self, state: WorldState) -> World:
        """Return the live world of a state, restored if need be; it is not idle any more."""
        if state.failure or state.is_released:
            raise WorldError(f"a state cannot be used: {state.failure or 'it was released'}")
        self._idle.pop(state, None)
        if state.world is None:
            snapshot = state.snapshot
            if snapshot is None:
                raise WorldError("a state cannot be used: its world is lost")
            state.world = await self._open(lambda: self.environment.restore(snapshot))
            self.usage.restored += 1
        return state.world

    async def _drop_world(self, state: WorldState) -> None:
        """Discard the world of a state after a failure; the state stays if it has a snapshot."""
        world, state.world = state.world, None
        if state.snapshot is None:
            state.failure = state.failure or "its world failed"
        if world is not None:
            await self._discard(world)

    async def _snapshot(self, world: World) -> str:
        name = await self._call(world.snapshot(), "a snapshot")
        if not isinstance(name, str):
            raise WorldError(f"the environment returned {name!r:.80} as the id of a snapshot")
        self.usage.snapshots += 1
        self.usage.stored += 1
        return name

    async def _open(self, make: Callable[[], Awaitable[World]]) -> World:
        """Return a new world, once there is room for one."""
        while self.usage.live >= self._max_live and not await self._make_room():
            room = self._loop.create_future()
            self._waiting.append(room)
            await room
        self.usage.live += 1
        self.usage.most_live = max(self.usage.most_live, self.usage.live)
        try:
            return await self._call(make(), "starting a world")
        except BaseException:
            self._free_place()
            raise

    async def _make_room(self) -> bool:
        """Snapshot and close the world that has been idle for longest; False if none is idle."""
        state = next((state for state in self._idle if not state.num_users), None)
        if state is None:
            return False
        del self._idle[state]
        async with self._using(state):
            world = state.world
            assert world is not None
            if state.snapshot is None:
                try:
                    state.snapshot = await self._snapshot(world)
                except Exception as error:
                    state.failure = describe_failure(error)
                except BaseException:  # the call that needs room was cancelled
                    self._set_idle(state, world)
                    raise
            state.world = None
            await self._discard(world)
        return self.usage.live < self._max_live

    @asynccontextmanager
    async def _using(self, state: WorldState) -> AsyncIterator[None]:
        """Use the world of a state alone."""
        state.num_users += 1
        try:
            async with state.lock:
                yield
        finally:
            state.num_users -= 1
            self._wake()

    def _keep(self, world: World) -> WorldState:
        """Return a state for a live world that nobody uses now."""
        state = WorldState()
        self._states.add(state)
        self._set_idle(state, world)
        return state

    def _set_idle(self, state: WorldState, world: World) -> None:
        state.world = world
        self._idle[state] = None
        self._wake()

    def _free_place(self) -> None:
        self.usage.live -= 1
        self._wake()

    def _wake(self) -> None:
        """Let the coroutines that wait for room look again."""
        for room in self._waiting:
            if not room.done():
                room.set_result(None)
        self._waiting.clear()

    async def _discard(self, world: World) -> None:
        """Close a world, also if the caller is cancelled meanwhile."""
        await asyncio.shield(self._discard_later(world))

    def _discard_later(self, world: World) -> asyncio.Task[None]:
        return self._spawn(self._close_world(world))

    async def _close_world(self, world: World) -> None:
        try:
            with suppress(Exception):  # the environment closes it at the end, if it can
                await self._call(world.close(), "closing a world")
        finally:
            self._free_place()

    def _end_later(self, state: WorldState) -> None:
        if not state.is_released:
            state.is_released = True
            self._spawn(self._end(state))

    async def _end(self, state: WorldState) -> None:
        async with self._using(state):
            self._idle.pop(state, None)
            self._states.discard(state)
            world, snapshot = state.world, state.snapshot
            state.world = state.snapshot = None
            if world is not None:
                await self._discard(world)
            if snapshot is not None:
                with suppress(Exception):  # the environment deletes it at the end, if it can
                    await self._call(self.environment.delete(snapshot), "deleting a snapshot")
                    self.usage.stored -= 1

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(call)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def _call(self, call: Awaitable[T], what: str) -> T:
        """Await a call of the environment, for a limited time; see `limit_time`."""
        return await limit_time(call, what, self._max_seconds)

    async def _close_all(self) -> None:
        this_task = asyncio.current_task()
        deadline = self._loop.time() + _CLOSING_SECONDS
        while (tasks := asyncio.all_tasks() - {this_task}) and self._loop.time() < deadline:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - self._loop.time()))
        # A call that ignores its cancellation may hold the lock of a state.
        await asyncio.gather(*(self._end(s) for s in list(self._states) if not s.lock.locked()))
        await self._call(self.environment.close(), "closing the environment")
        await self._loop.shutdown_asyncgens()


async def _await_shielded(future: Future[T]) -> T:
    """Await a future, which is not cancelled with the caller."""
    return await asyncio.shield(asyncio.wrap_future(future))
