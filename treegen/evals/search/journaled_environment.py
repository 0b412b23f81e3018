"""An environment that stores its actions in a journal; see `search.action_journal`."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from treegen.errors import CapacityError, InputError, WorldError
from treegen.evals.search.action_journal import OBSERVE, ActionJournal, Episode, Keys
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import (
    Environment,
    LastingEnvironment,
    Observation,
    Traits,
    World,
    call_key,
    check_observation,
    describe_failure,
)
from treegen.search.environments.states import MAX_SECONDS, limit_time

T = TypeVar("T")

_MAX_SPARE: Final = 64
"""Maximum number of spare snapshots of a search; see `JournaledEnvironment`."""


class JournaledEnvironment:
    """An environment whose actions are stored in a journal, and read from it where it has them.

    `start` takes an `Episode`.

    If the environment keeps snapshots, each new state is snapshotted. While a search runs, a
    snapshot without users (worlds or stored states in its state) is spare: only another branch with
    the same actions may need it, in this or in a resumed run. If a search has more than 64 spare
    snapshots, the oldest is deleted. If there is no room for a new snapshot, the oldest spare
    snapshots of all searches are deleted until there is. A branch that needs a deleted snapshot
    runs its actions again from the nearest earlier one, with a warning.
    When a search stops, its snapshots stay for a resumed run until its record is stored.

    Attributes:
        inner: The environment itself.
        journal: Stores the actions.
        keeps_snapshots: Whether snapshots outlive the process.
        keeps_ends: Whether states in which the environment ends the episode are snapshotted, too.
        finished: Names of searches whose records are stored, so that their snapshots can be
            deleted. Any thread may append to it.
        is_finished: Whether all records of the run are stored.
    """

    def __init__(
        self,
        environment: Environment,
        journal: ActionJournal,
        *,
        keeps_snapshots: bool,
        keeps_ends: bool = False,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Create an environment without worlds.

        Args:
            environment: Runs the actions.
            journal: Stores them.
            keeps_snapshots: Whether snapshots of the environment survive the process.
            keeps_ends: Whether states in which the environment ends the episode are snapshotted,
                too, because `revive` may need them.
            max_seconds: Longest time of one call of the environment. A longer action is stored as
                failed.
        """
        self.inner, self.journal = environment, journal
        self.keeps_snapshots = keeps_snapshots and environment.traits.has_snapshots
        self.keeps_ends = keeps_ends
        self.finished = deque[str]()
        self.is_finished = False
        self._max_seconds = max_seconds
        self._states: dict[str, tuple[Episode, Keys, str | None]] = {}
        self._number = 0
        self._num_users = Counter[str]()  # by snapshot: the worlds and states that are in its state
        self._spare: dict[str, str] = {}  # snapshots without users and their searches, oldest first
        self._deletions = set[asyncio.Future[None]]()
        self._lock = asyncio.Lock()
        self._has_leftovers = isinstance(environment, LastingEnvironment)
        self._has_warned = self._has_warned_of_saving = False

    @property
    def traits(self) -> Traits:
        """Those of the environment. Forks of one without snapshots replay their actions."""
        return replace(self.inner.traits, has_snapshots=True)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools of the environment."""
        return self.inner.tools

    async def start(self, problem: Episode) -> _JournaledWorld:
        """Return a world that starts with its first action that is not stored."""
        return _JournaledWorld(self, problem, (), None)

    async def restore(self, snapshot: str) -> _JournaledWorld:
        """Return a world in the state of a snapshot, which is restored when it is needed.

        Raises:
            InputError: There is no such snapshot.
        """
        if snapshot not in self._states:
            raise InputError(f"there is no snapshot {snapshot!r}, because the snapshot was deleted")
        return _JournaledWorld(self, *self._states[snapshot])

    async def revive(self, episode: Episode, path: Keys) -> World:
        """Return a new live world in a state, which may change without a trace in the journal.

        Args:
            episode: The episode.
            path: The keys of the actions that led to the state and may have changed its world.
        """
        entry = self.journal.find(episode.search, path[:-1], path[-1]) if path else None
        world = _JournaledWorld(self, episode, path, entry.snapshot if entry else None)
        try:
            return await world.live()
        finally:
            await world.leave()

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot; unknown ids do nothing."""
        if snapshot in self._states:
            episode, _, inner = self._states.pop(snapshot)
            await self.release(inner, episode)

    async def close(self) -> None:
        """Close the environment. Snapshots that a resumed run may need stay."""
        self._states.clear()
        try:
            if self.is_finished or (self._has_leftovers and self.finished):
                await self._remove_leftovers()
            await self.delete_finished()
        finally:
            inner, keep = self.inner, self.journal.snapshots()
            closing = inner.close(keep) if isinstance(inner, LastingEnvironment) else inner.close()
            await self.call(closing, "closing the environment")

    def store(self, episode: Episode, path: Keys, inner: str | None) -> str:
        """Return the id of a state.

        Args:
            episode: Its episode.
            path: The actions before it.
            inner: The id of its snapshot in the environment; None if there is none.
        """
        self._number += 1
        name = f"journal-{self._number}"
        self._states[name] = episode, path, inner
        self.hold(inner)
        return name

    async def save(self, world: World) -> str:
        """Return the id of a new snapshot, after deleting spare ones until there is room."""
        await self.delete_finished()
        while True:
            try:
                return await self._snapshot(world)
            except CapacityError:
                if not self._spare:
                    raise
                await self._delete(next(iter(self._spare)))

    async def _snapshot(self, world: World) -> str:
        """Return the id of a new snapshot. If the caller no longer waits, it is deleted."""
        limited = limit_time(world.snapshot(), "a snapshot", 2 * self._max_seconds)
        saving = asyncio.ensure_future(limited)
        try:
            return await self.call(asyncio.shield(saving), "a snapshot")
        except BaseException:
            saving.add_done_callback(self._delete_late)
            raise

    def _delete_late(self, saving: asyncio.Future[str]) -> None:
        if not saving.cancelled() and saving.exception() is None:
            deletion = asyncio.ensure_future(self._delete(saving.result()))
            self._deletions.add(deletion)
            deletion.add_done_callback(self._deletions.discard)

    async def try_save(self, world: World) -> str | None:
        """Return the id of a new snapshot of a world; None, with one warning, if that fails."""
        try:
            return await self.save(world)
        except Exception as error:
            if not self._has_warned_of_saving:
                self._has_warned_of_saving = True
                warnings.warn(
                    f"some states have no snapshot ({describe_failure(error)}); if the search "
                    "or a resumed run returns to such a state, treegen runs the actions before "
                    "the state again",
                    RuntimeWarning,
                    stacklevel=1,
                )
            return None

    def hold(self, inner: str | None) -> None:
        """Add a user of a snapshot: a world or a stored state in its state."""
        if inner is not None:
            self._num_users[inner] += 1
            self._spare.pop(inner, None)

    async def release(self, inner: str | None, episode: Episode) -> None:
        """Remove a user of a snapshot, and delete the snapshot if nothing needs it any more.

        Args:
            inner: The snapshot; None if there is none.
            episode: The episode of its state.
        """
        if inner is None:
            return
        self._num_users[inner] -= 1
        if self._num_users[inner] <= 0:
            del self._num_users[inner]
            if not self.journal.has_snapshot(inner):
                await self._delete(inner)
            elif episode.is_running():
                self._spare[inner] = episode.search
                spare = [name for name, of in self._spare.items() if of == episode.search]
                if len(spare) > _MAX_SPARE:
                    await self._delete(spare[0])

    async def delete_finished(self) -> None:
        """Delete the snapshots of searches whose records are stored."""
        while self.finished:
            for snapshot in self.journal.snapshots(self.finished.popleft()):
                await self._delete(snapshot)
        for snapshot in self.journal.snapshots() if self.is_finished else ():
            await self._delete(snapshot)

    async def _delete(self, snapshot: str) -> None:
        self._spare.pop(snapshot, None)
        self.journal.forget_snapshot(snapshot)
        with suppress(Exception):  # the environment deletes it at the end, if it can
            await self.call(self.inner.delete(snapshot), "deleting a snapshot")

    async def open(self, make: Callable[[], Awaitable[World]]) -> World:
        """Return a new world. What killed processes have left is removed before the first one."""
        async with self._lock:
            if self._has_leftovers:
                await self._remove_leftovers()
        return await self.call(make(), "starting a world")

    async def _remove_leftovers(self) -> None:
        self._has_leftovers = False
        if isinstance(self.inner, LastingEnvironment):
            leftovers = self.inner.remove_leftovers(self.journal.snapshots())
            try:
                await self.call(leftovers, "removing leftovers")
            except Exception as error:
                warnings.warn(
                    "worlds or snapshots of killed processes may still exist, because their "
                    f"removal failed: {describe_failure(error)}",
                    RuntimeWarning,
                    stacklevel=1,
                )

    async def call(self, call: Awaitable[T], what: str) -> T:
        """Await a call of the environment, for a limited time; see `limit_time`."""
        return await limit_time(call, what, self._max_seconds)

    def count_replayed(self) -> None:
        """Count an action that runs again, and warn of it once if snapshots should prevent it."""
        self.journal.num_replayed += 1
        if self.keeps_snapshots and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "snapshots of some states were deleted or lost, so treegen runs stored actions "
                "again",
                RuntimeWarning,
                stacklevel=1,
            )


class _JournaledWorld:
    """A state of an episode, with a live world only if one was needed."""

    def __init__(
        self, environment: JournaledEnvironment, episode: Episode, path: Keys, snapshot: str | None
    ) -> None:
        self._environment, self._journal = environment, environment.journal
        self._episode, self._path, self._snapshot = episode, path, snapshot
        self._world: World | None = None
        environment.hold(snapshot)

    async def run(self, action: ToolCall) -> Observation:
        """Run an action that is not stored, or read what it has shown."""
        if action.name in self._environment.traits.pure_tools:
            return await self._look(action)
        key = call_key(action)
        entry = self._journal.find(self._episode.search, self._path, key)
        if entry is not None:
            self._journal.num_read += 1
            await self._end_world()  # it is in the state before the action
            if entry.raised:
                raise WorldError(entry.observation.failure)
            observation, snapshot = entry.observation, entry.snapshot
        else:
            observation, snapshot = await self._run(await self.live(), action)
        self._path = (*self._path, key)
        await self._move(snapshot)
        return observation

    async def _run(self, world: World, action: ToolCall) -> tuple[Observation, str | None]:
        """Run an action, store it, and return what it shows and a snapshot of the state after it.

        An action whose error was stored does not run again in a resumed run.
        """
        environment = self._environment
        store = partial(self._journal.append, self._episode.search, self._path, action)
        observation = snapshot = None
        self._journal.begin(self._episode.search, self._path, action)
        try:
            observation = await environment.call(world.run(action), f"the action {action.name}")
            check_observation(observation)
            can_return = not observation.failure and (
                environment.keeps_ends or not observation.is_done
            )
            if environment.keeps_snapshots and can_return:
                snapshot = await environment.try_save(world)
        except Exception as error:
            store(Observation(failure=describe_failure(error)), raised=True)
            raise
        except BaseException:
            if observation is not None:
                store(observation)
            raise
        store(observation, snapshot)
        return observation, snapshot

    async def _move(self, snapshot: str | None) -> None:
        """Become a user of a snapshot in place of the previous one; None if the state has none."""
        before, self._snapshot = self._snapshot, snapshot
        self._environment.hold(snapshot)
        await self._environment.release(before, self._episode)

    async def observe(self) -> Observation:
        """Return what the state shows, from the journal if it was observed before."""
        return await self._look(OBSERVE)

    async def snapshot(self) -> str:
        """Return the id of the state; a live world is snapshotted."""
        environment = self._environment
        can_store = environment.inner.traits.has_snapshots
        if can_store and self._world is not None and self._snapshot is None:
            await self._move(await environment.save(self._world))
        return environment.store(self._episode, self._path, self._snapshot)

    async def close(self) -> None:
        """Close the live world if there is one. A second call does nothing."""
        try:
            await self._end_world()
        finally:
            await self.leave()

    async def leave(self) -> None:
        """Stop using the snapshot of the state. The live world, if there is one, stays."""
        await self._move(None)

    async def _end_world(self) -> None:
        if (world := self._world) is not None:
            self._world = None
            await self._environment.call(world.close(), "closing a world")

    async def _look(self, action: ToolCall) -> Observation:
        """Return what an action shows that changes nothing."""
        entry = self._journal.find(self._episode.search, self._path, call_key(action))
        if entry is not None:
            self._journal.num_read += 1
            if entry.raised:
                raise WorldError(entry.observation.failure)
            return entry.observation
        world = await self.live()
        call = world.observe() if action is OBSERVE else world.run(action)
        store = partial(self._journal.append, self._episode.search, self._path, action)
        what = f"the action {action.name or 'observe'}"
        try:
            observation = await self._environment.call(call, what)
            check_observation(observation)
        except Exception as error:
            store(Observation(failure=describe_failure(error)), raised=True)
            raise
        store(observation)
        return observation

    async def live(self) -> World:
        """Return a live world in this state."""
        if self._world is None:
            self._world = await self._revive()
        return self._world

    async def _revive(self) -> World:
        """Restore the last snapshot on the path, and run the actions after it again."""
        world, start = await self._restore()
        search, path = self._episode.search, self._path
        try:
            for length in range(start, len(path)):
                entry = self._journal.find(search, path[:length], path[length])
                name, arguments = json.loads(path[length])
                self._environment.count_replayed()
                again = world.run(ToolCall(name, arguments))
                observation = await self._environment.call(again, f"the action {name}")
                if entry is not None and observation != entry.observation:
                    raise WorldError(
                        f"action {length + 1} of an episode, {name}, returned a different result "
                        "when treegen ran the action again, so the branch ends"
                    )
        except BaseException:
            with suppress(Exception):  # the first error matters more
                await self._environment.call(world.close(), "closing a world")
            raise
        return world

    async def _restore(self) -> tuple[World, int]:
        """Restore the last snapshot on the path; return a world and its number of actions."""
        environment, search = self._environment, self._episode.search
        for length in range(len(self._path), -1, -1):
            snapshot = self._snapshot
            if length < len(self._path):
                before = self._path[: length - 1], self._path[length - 1]
                entry = self._journal.find(search, *before) if length else None
                snapshot = None if entry is None else entry.snapshot
            if snapshot is None:
                continue
            environment.hold(snapshot)  # so that no other branch deletes it meanwhile
            try:
                restore = partial(environment.inner.restore, snapshot)
                return await environment.open(restore), length
            except InputError:  # it did not survive
                self._journal.forget_snapshot(snapshot)
                if length == len(self._path):
                    await self._move(None)
            finally:
                await environment.release(snapshot, self._episode)
        return await environment.open(partial(environment.inner.start, self._episode.problem)), 0
