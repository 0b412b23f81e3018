"""The actions of a run's agents, stored as they happen, so that a killed run goes on from them.

A resumed search takes the same steps again. Actions that the journal has are not run again: their
observations are read. The first action that it does not have needs a live world, which is restored
from the last snapshot of its branch. If there is none, the actions before it run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from treegen.errors import InputError, RunError, WorldError
from treegen.evals.problem import Problem
from treegen.prompts.replies.types import ToolCall
from treegen.runs import RecordFile
from treegen.search.environments.observations import (
    call_key,
    check_observation,
    describe_failure,
)
from treegen.search.environments.protocol import Environment, Observation, Traits, World

LOCK_FILE: Final = "actions.lock"
_OBSERVE: Final = ToolCall("", {})
"""What stands for `World.observe` in a journal."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What an episode starts from: a search and its problem."""

    search: str
    """The name of the search."""
    problem: Problem


@dataclass(slots=True)
class _Entry:
    """An action that has run."""

    observation: Observation
    snapshot: str | None
    """A snapshot of the state after it; None if there is none."""
    raised: bool = False
    """Whether the environment raised an error, whose text is the failure of the observation."""


Keys = tuple[str, ...]
"""The keys of the actions of an episode that may have changed its world."""


class ActionJournal:
    """The stored actions of one run, in a file of records.

    Attributes:
        num_read: Actions whose observation was read and that did not run again.
        num_replayed: Actions that ran again, because no snapshot had survived.
    """

    def __init__(self, file: RecordFile) -> None:
        """Read the stored actions.

        Args:
            file: The file, open to append.
        """
        self._file = file
        self._entries: dict[tuple[str, Keys, str], _Entry] = {}
        self._next = file.next_indices()
        self.num_read = self.num_replayed = 0
        self._holders = dict[str, _Entry]()  # by snapshot
        for record in file.records():
            try:
                self._enter(_key(record), _read(record))
            except (AttributeError, KeyError, TypeError, ValueError, WorldError) as error:
                raise RunError(
                    f"{file.path} has an action that cannot be read ({error!r:.100}); remove its "
                    "line, and the action runs again"
                ) from None

    @property
    def num_stored(self) -> int:
        """The number of stored actions."""
        return len(self._entries)

    def find(self, search: str, path: Keys, key: str) -> _Entry | None:
        """Return what an action has shown; None if it has not run.

        Args:
            search: The name of the search.
            path: The actions before it.
            key: The action.
        """
        return self._entries.get((search, path, key))

    def append(
        self,
        search: str,
        path: Keys,
        action: ToolCall,
        shown: Observation,
        snapshot: str | None = None,
        *,
        raised: bool = False,
    ) -> None:
        """Store an action that has run.

        Args:
            search: The name of the search.
            path: The keys of the actions before it.
            action: The action.
            shown: What it has shown.
            snapshot: A snapshot of the state after it. Default: there is none.
            raised: Whether the environment raised an error, whose text is the failure in `shown`.
        """
        record = {
            "problem_id": search,
            "sample_index": self._next[search],
            "before": list(path),
            "action": {"name": action.name, "arguments": action.arguments},
            "observation": _observation_record(shown),
            "snapshot": snapshot,
            **({"raised": True} if raised else {}),
        }
        self._file.append(record)
        self._next[search] += 1
        self._enter((search, path, call_key(action)), _Entry(shown, snapshot, raised))

    def _enter(self, key: tuple[str, Keys, str], entry: _Entry) -> None:
        self._entries[key] = entry
        if entry.snapshot is not None:
            self._holders[entry.snapshot] = entry

    def snapshots(self) -> Iterable[str]:
        """Return the ids of all snapshots that were stored."""
        return list(self._holders)

    def forget_snapshot(self, snapshot: str) -> None:
        """Note that a snapshot does not exist any more."""
        if (entry := self._holders.pop(snapshot, None)) is not None:
            entry.snapshot = None


def _key(record: Mapping[str, Any]) -> tuple[str, Keys, str]:
    action = ToolCall(record["action"]["name"], record["action"]["arguments"])
    return record["problem_id"], tuple(record["before"]), call_key(action)


def _read(record: Mapping[str, Any]) -> _Entry:
    values = record["observation"]
    images = tuple(map(bytes.fromhex, values.get("images", ())))
    shown, snapshot = Observation(**{**values, "images": images}), record["snapshot"]
    check_observation(shown)
    if not isinstance(snapshot, str | None):
        raise TypeError(f"the snapshot {snapshot!r:.40}")
    return _Entry(shown, snapshot, record.get("raised") is True)


def _observation_record(shown: Observation) -> dict[str, Any]:
    values = {name: getattr(shown, name) for name in Observation.__slots__}
    return {**values, "images": [image.hex() for image in shown.images]}


class JournaledEnvironment:
    """An environment whose actions are stored in a journal, and read from it where it has them.

    `start` takes an `Episode`.

    Attributes:
        is_finished: Whether nothing will go on from the stored snapshots, so `close` deletes them.
    """

    def __init__(
        self, environment: Environment, journal: ActionJournal, *, keeps_snapshots: bool
    ) -> None:
        """Create an environment without worlds.

        Args:
            environment: Runs the actions.
            journal: Stores them.
            keeps_snapshots: Whether snapshots of the environment survive the process. If so, each
                state is snapshotted as soon as it is reached.
        """
        self.inner, self.journal = environment, journal
        self.keeps_snapshots = keeps_snapshots and environment.traits.has_snapshots
        self._states: dict[str, tuple[Episode, Keys, str | None]] = {}
        self._number = 0
        self.is_finished = False

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
            raise InputError(f"there is no snapshot {snapshot!r}; it was deleted")
        return _JournaledWorld(self, *self._states[snapshot])

    async def revive(self, episode: Episode, path: Keys) -> World:
        """Return a new live world in a state, which may change without a trace in the journal.

        Args:
            episode: The episode.
            path: The keys of the actions that led to the state and may have changed its world.
        """
        return await _JournaledWorld(self, episode, path, None)._live()

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot; unknown ids do nothing."""
        _, _, inner = self._states.pop(snapshot, (None, (), None))
        if inner is not None and all(other != inner for _, _, other in self._states.values()):
            self.journal.forget_snapshot(inner)
            await self.inner.delete(inner)

    async def close(self) -> None:
        """Close the environment, and delete all stored snapshots if the run is finished."""
        self._states.clear()
        async with AsyncExitStack() as stack:  # each step runs, also if another one fails
            stack.push_async_callback(self.inner.close)
            for snapshot in self.journal.snapshots() if self.is_finished else ():
                stack.push_async_callback(self.inner.delete, snapshot)

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
        return name


class _JournaledWorld:
    """A state of an episode, with a live world only if one was needed."""

    def __init__(
        self, environment: JournaledEnvironment, episode: Episode, path: Keys, snapshot: str | None
    ) -> None:
        self._environment, self._journal = environment, environment.journal
        self._episode, self._path, self._snapshot = episode, path, snapshot
        self._world: World | None = None

    async def run(self, action: ToolCall) -> Observation:
        """Run an action that is not stored, or read what it has shown."""
        if action.name in self._environment.traits.pure_tools:
            return await self._look(action)
        key = call_key(action)
        entry = self._journal.find(self._episode.search, self._path, key)
        if entry is not None:
            self._journal.num_read += 1
            await self.close()  # it is in the state before the action
            if entry.raised:
                raise WorldError(entry.observation.failure)
            shown, snapshot = entry.observation, entry.snapshot
        else:
            shown, snapshot = await self._run(await self._live(), action)
        self._path, self._snapshot = (*self._path, key), snapshot
        return shown

    async def _run(self, world: World, action: ToolCall) -> tuple[Observation, str | None]:
        """Run an action, store it, and return what it shows and a snapshot of the state after it.

        An action whose error was stored does not run again in a resumed run.
        """
        store = partial(self._journal.append, self._episode.search, self._path, action)
        try:
            shown = await world.run(action)
            check_observation(shown)
        except Exception as error:
            store(Observation(failure=describe_failure(error)), raised=True)
            raise
        snapshot = None
        try:
            if self._environment.keeps_snapshots and not (shown.is_done or shown.failure):
                snapshot = await world.snapshot()
        finally:
            store(shown, snapshot)
        return shown, snapshot

    async def observe(self) -> Observation:
        """Return what the state shows, from the journal if it was observed before."""
        return await self._look(_OBSERVE)

    async def snapshot(self) -> str:
        """Return the id of the state; a live world is snapshotted."""
        can_store = self._environment.inner.traits.has_snapshots
        if can_store and self._world is not None and self._snapshot is None:
            self._snapshot = await self._world.snapshot()
        return self._environment.store(self._episode, self._path, self._snapshot)

    async def close(self) -> None:
        """Close the live world if there is one."""
        if (world := self._world) is not None:
            self._world = None
            await world.close()

    async def _look(self, action: ToolCall) -> Observation:
        """Return what an action shows that changes nothing."""
        entry = self._journal.find(self._episode.search, self._path, call_key(action))
        if entry is not None:
            self._journal.num_read += 1
            return entry.observation
        world = await self._live()
        shown = await (world.observe() if action is _OBSERVE else world.run(action))
        self._journal.append(self._episode.search, self._path, action, shown)
        return shown

    async def _live(self) -> World:
        """Return a live world in this state."""
        if self._world is None:
            self._world = await self._revive()
        return self._world

    async def _revive(self) -> World:
        """Restore the last snapshot on the path, and run the actions after it again."""
        world, start = await self._restore()
        search, path = self._episode.search, self._path
        try:
            for place in range(start, len(path)):
                entry = self._journal.find(search, path[:place], path[place])
                name, arguments = json.loads(path[place])
                self._journal.num_replayed += 1
                shown = await world.run(ToolCall(name, arguments))
                if entry is not None and shown != entry.observation:
                    raise WorldError(
                        f"action {place + 1} of an episode, {name}, shows something else when it "
                        "runs again, so its branch cannot go on"
                    )
        except BaseException:
            await world.close()
            raise
        return world

    async def _restore(self) -> tuple[World, int]:
        """Return a world in the last state that can be had, and how many actions led to it."""
        inner, search = self._environment.inner, self._episode.search
        for place in range(len(self._path), 0, -1):
            entry = self._journal.find(search, self._path[: place - 1], self._path[place - 1])
            snapshot = None if entry is None else entry.snapshot
            if place == len(self._path):
                snapshot = self._snapshot
            if snapshot is None:
                continue
            try:
                return await inner.restore(snapshot), place
            except InputError:  # it did not survive
                self._journal.forget_snapshot(snapshot)
        if not self._path and self._snapshot is not None:
            return await inner.restore(self._snapshot), 0
        return await inner.start(self._episode.problem), 0
