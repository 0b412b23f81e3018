"""A journal of the actions of a run's agents, from which a resumed run continues.

A resumed search takes the same steps again. Actions in the journal are not run again: the search
reads their stored observations. The first action that is not in the journal needs a live world,
which is restored from the last snapshot of its branch. If there is no snapshot, the actions before
it run again.

An action is stored when it begins, and again with what it has shown when it ends. So a resumed run
knows which actions may have run without an end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from treegen.errors import RunError, WorldError
from treegen.evals.problem import Problem
from treegen.prompts.replies.types import ToolCall
from treegen.runs import RecordFile
from treegen.search.environments.protocol import Observation, call_key, check_observation

LOCK_FILE: Final = "actions.lock"
OBSERVE: Final = ToolCall("", {})
"""The action that represents a call of `World.observe` in a journal."""

_FORM_ERRORS: Final = (AttributeError, KeyError, OverflowError, TypeError, ValueError, WorldError)


@dataclass(frozen=True, slots=True)
class Episode:
    """What an episode starts from: a search and its problem."""

    search: str
    """The name of the search."""
    problem: Problem
    is_running: Callable[[], bool] = lambda: False
    """Returns whether the search is still running. Default: it is not."""


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
_ActionId = tuple[str, str]
"""A search, and the id of an action in it."""


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
        self._entries: dict[_ActionId, _Entry] = {}
        self._next = file.next_indices()
        self.num_read = self.num_replayed = 0
        self._holders = dict[str, tuple[str, _Entry]]()  # by snapshot: its search and its entry
        self._begun = dict[_ActionId, str]()  # the keys of actions without an end
        for record in file.records():
            try:
                action_id, key = _parse_action(record)
                if record.get("begins") is True:
                    self._begun[action_id] = key
                else:
                    self._enter(action_id, _read(record))
            except _FORM_ERRORS as error:
                raise RunError(
                    f"{file.path} has an action that cannot be read ({error!r:.100}); remove "
                    "this line, so that treegen runs the action again"
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
        return self._entries.get((search, _id_of((*path, key))))

    def list_unfinished(self, searches: Collection[str]) -> list[tuple[str, str]]:
        """Return the actions of searches that began and have no end, as searches and their keys."""
        return [(search, key) for (search, _), key in self._begun.items() if search in searches]

    def begin(self, search: str, path: Keys, action: ToolCall) -> None:
        """Store that an action begins.

        Args:
            search: The name of the search.
            path: The keys of the actions before it.
            action: The action.
        """
        action_id = self._store(search, path, action, {"begins": True})
        self._begun[action_id] = call_key(action)

    def append(
        self,
        search: str,
        path: Keys,
        action: ToolCall,
        observation: Observation,
        snapshot: str | None = None,
        *,
        raised: bool = False,
    ) -> None:
        """Store an action that has run.

        Args:
            search: The name of the search.
            path: The keys of the actions before it.
            action: The action.
            observation: What it has shown.
            snapshot: A snapshot of the state after it. Default: there is none.
            raised: Whether the environment raised an error, whose text is the failure in
                `observation`.
        """
        end = {"observation": _observation_record(observation), "snapshot": snapshot}
        action_id = self._store(search, path, action, {**end, "raised": True} if raised else end)
        self._enter(action_id, _Entry(observation, snapshot, raised))

    def _store(
        self, search: str, path: Keys, action: ToolCall, what: Mapping[str, Any]
    ) -> _ActionId:
        before = _id_of(path)
        action_id = _id_of((call_key(action),), before)
        record = {
            "problem_id": search,
            "sample_index": self._next[search],
            "id": action_id,
            "before": before,
            "action": {"name": action.name, "arguments": action.arguments},
            **what,
        }
        self._file.append(record)
        self._next[search] += 1
        return search, action_id

    def _enter(self, action_id: _ActionId, entry: _Entry) -> None:
        self._entries[action_id] = entry
        self._begun.pop(action_id, None)
        if entry.snapshot is not None:
            self._holders[entry.snapshot] = action_id[0], entry

    def snapshots(self, search: str | None = None) -> list[str]:
        """Return the ids of the stored snapshots of a search, or of all."""
        return [name for name, (of, _) in self._holders.items() if search in (None, of)]

    def has_snapshot(self, snapshot: str) -> bool:
        """Return whether a resumed run may need a snapshot."""
        return snapshot in self._holders

    def forget_snapshot(self, snapshot: str) -> None:
        """Note that a snapshot does not exist any more."""
        if snapshot in self._holders:
            self._holders.pop(snapshot)[1].snapshot = None


def _id_of(keys: Sequence[str], before: str = "") -> str:
    """Return the id of the last of some actions; "" if there are none.

    Args:
        keys: The keys of the actions.
        before: The id of the action before them. Default: they are the first.
    """
    return reduce(_next_id, keys, before)


def _next_id(before: str, key: str) -> str:
    text = f"{before} {key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _parse_action(record: Mapping[str, Any]) -> tuple[_ActionId, str]:
    """Return the id of an action, and its key."""
    key = call_key(ToolCall(record["action"]["name"], record["action"]["arguments"]))
    before = record["before"]
    if isinstance(before, list):  # earlier versions wrote the keys of the actions before it
        before = _id_of(before)
    if not isinstance(before, str):
        raise TypeError(f"the field `before` must be text, got {before!r:.40}")
    return (record["problem_id"], _next_id(before, key)), key


def _read(record: Mapping[str, Any]) -> _Entry:
    values = record["observation"]
    images = tuple(map(bytes.fromhex, values.get("images", ())))
    observation, snapshot = Observation(**{**values, "images": images}), record["snapshot"]
    check_observation(observation)
    if not isinstance(snapshot, str | None):
        raise TypeError(f"the field `snapshot` must be text or null, got {snapshot!r:.40}")
    return _Entry(observation, snapshot, record.get("raised") is True)


def _observation_record(observation: Observation) -> dict[str, Any]:
    values = {name: getattr(observation, name) for name in Observation.__slots__}
    return {**values, "images": [image.hex() for image in observation.images]}
