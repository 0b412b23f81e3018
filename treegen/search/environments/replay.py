"""Forks of environments without snapshots: their actions run again from the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from treegen.errors import InputError, WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Environment, Observation, Traits, World


@dataclass(frozen=True, slots=True)
class _History:
    """How a state was reached."""

    problem: Any
    actions: tuple[tuple[ToolCall, Observation], ...] = ()
    """Actions that may have changed the state, with their observations."""


class ReplayEnvironment:
    """Gives an environment without snapshots forks, by running the actions again from the start.

    The actions must have the same effects each time. treegen compares each observation with that
    of the first time, and raises WorldError at a difference. Actions that reach outside the
    environment, such as requests to servers, happen once per fork.

    Attributes:
        num_replayed: Actions that forks have run again.
    """

    def __init__(self, environment: Environment) -> None:
        """Create an environment without worlds.

        Args:
            environment: Starts the worlds.
        """
        self._environment = environment
        self._histories: dict[str, _History] = {}
        self._numbers = count(1)
        self.num_replayed = 0

    @property
    def traits(self) -> Traits:
        """What it can do: forks take as long as all actions before them."""
        return replace(self._environment.traits, has_snapshots=True, forks_cheaply=False)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools of its worlds."""
        return self._environment.tools

    async def start(self, problem: Any) -> _ReplayWorld:
        """Return a new world in the first state of a problem."""
        return _ReplayWorld(self, await self._environment.start(problem), _History(problem))

    async def restore(self, snapshot: str) -> _ReplayWorld:
        """Return a new world in which the actions of a snapshot have run again.

        Raises:
            InputError: There is no such snapshot.
            WorldError: An action shows something else than the first time.
        """
        if snapshot not in self._histories:
            raise InputError(f"there is no snapshot {snapshot!r}; it was deleted")
        history = self._histories[snapshot]
        world = await self._environment.start(history.problem)
        try:
            for index, (action, before) in enumerate(history.actions, 1):
                self.num_replayed += 1
                after = await world.run(action)
                if after != before:
                    raise WorldError(
                        f"action {index} of {len(history.actions)}, {action.name}, shows "
                        f"{_describe_difference(after, before)} when it runs again; without "
                        "snapshots, treegen can fork an environment only if equal actions always "
                        "have equal results"
                    )
        except BaseException:
            await world.close()
            raise
        return _ReplayWorld(self, world, history)

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot; unknown ids do nothing."""
        self._histories.pop(snapshot, None)

    async def close(self) -> None:
        """Close all worlds and delete all snapshots."""
        self._histories.clear()
        await self._environment.close()


class _ReplayWorld:
    """One live world, and how its state was reached."""

    def __init__(self, environment: ReplayEnvironment, world: World, history: _History) -> None:
        self._environment, self._world, self._history = environment, world, history

    async def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows."""
        observation = await self._world.run(action)
        if action.name not in self._environment.traits.pure_tools:
            actions = (*self._history.actions, (action, observation))
            self._history = replace(self._history, actions=actions)
        return observation

    async def observe(self) -> Observation:
        """Return the observation of the state."""
        return await self._world.observe()

    async def snapshot(self) -> str:
        """Store the actions so far and return the id of the snapshot."""
        environment = self._environment
        name = f"replay-{next(environment._numbers)}"
        environment._histories[name] = self._history
        return name

    async def close(self) -> None:
        """Close the world."""
        await self._world.close()


def _describe_difference(after: Any, before: Observation) -> str:
    if not isinstance(after, Observation) or after.text != before.text:
        text = getattr(after, "text", after)
        return f"{text!r:.60} instead of {before.text!r:.60}"
    names = [
        name for name in Observation.__slots__ if getattr(after, name) != getattr(before, name)
    ]
    return f"another {' and '.join(names)}"
