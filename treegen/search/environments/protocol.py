"""The protocol of environments: worlds that tool calls change, with snapshots to fork them from.

A `World` is one live state. An `Environment` starts worlds, and restores them from snapshots. Its
methods are coroutines; a search runs them in an event loop of their own, so they may wait for
processes and networks without blocking the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from treegen.errors import InputError, WorldError
from treegen.prompts.replies.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a world shows after an action, or without one."""

    text: str = ""
    """Text for the model."""
    images: tuple[bytes, ...] = ()
    """Encoded images for the model, such as PNG files."""
    exit_status: int | None = None
    """Exit status of a program that ran; None if none did. Negative numbers are signals."""
    reward: float | None = None
    """The world's own judgement of its state so far; None if it has none."""
    is_done: bool = False
    """Whether the episode is over. No action follows."""
    failure: str = ""
    """Why the action did not end by itself, such as a limit that it reached; "" if it did. Such an
    observation ends its branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an environment can do, and needs."""

    has_snapshots: bool = True
    """Whether worlds have snapshots. If not, forks replay all actions from the start."""
    forks_cheaply: bool = False
    """Whether a snapshot or a restored world takes little time and memory."""
    pure_tools: frozenset[str] = frozenset()
    """Tools that change nothing and whose result follows from the state alone. Equal calls of them
    in one state run once."""
    needs_network: bool = False
    """Whether worlds talk to servers."""


class World(Protocol):
    """One live state of a problem's environment. One action runs at a time."""

    async def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows.

        An unknown tool or wrong arguments are an observation, which tells the model what is wrong,
        not an error.

        Raises:
            WorldError: The environment itself failed.
        """
        ...

    async def observe(self) -> Observation:
        """Return the observation of the state as it is; it changes nothing."""
        ...

    async def snapshot(self) -> str:
        """Store the state and return the id of the snapshot; the world goes on unchanged."""
        ...

    async def close(self) -> None:
        """Free what the world holds. Snapshots stay. A second call does nothing.

        A call that was cancelled may still run in a thread; it ends before the world is freed.
        Other methods raise StoppedError from now on.
        """
        ...


class Environment(Protocol):
    """Starts worlds of problems, and restores them from snapshots.

    An environment may also have a method `describe()`. Its result, a list of lines, is printed
    before a run.
    """

    @property
    def traits(self) -> Traits:
        """What it can do, and needs."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools of its worlds, as JSON schemas in OpenAI's format of function tools."""
        ...

    async def start(self, problem: Any) -> World:
        """Return a new world in the first state of a problem (`treegen.evals.problem.Problem`)."""
        ...

    async def restore(self, snapshot: str) -> World:
        """Return a new world in the state of a snapshot.

        Raises:
            InputError: There is no such snapshot (any more).
        """
        ...

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot. Worlds that were restored from it stay. Unknown ids do nothing."""
        ...

    async def close(self) -> None:
        """Close all worlds and delete all snapshots that this object made.

        A second call does nothing. `start` and `restore` raise StoppedError from now on.
        """
        ...


@runtime_checkable
class LastingEnvironment(Environment, Protocol):
    """An environment whose snapshots can outlive the process, for the next process of a run."""

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        """Remove what earlier processes of the run have left, and return how many things.

        Args:
            keep: Ids of their snapshots that stay. From now on, `delete` deletes them.
        """
        ...

    async def close(self, keep: Collection[str] = ()) -> None:
        """Close all worlds and delete all snapshots that this object made.

        Args:
            keep: Ids of snapshots that stay.
        """
        ...


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "text": (str,),
    "images": (tuple, list),
    "exit_status": (int, type(None)),
    "reward": (int, float, type(None)),
    "is_done": (bool,),
    "failure": (str,),
}


_MEMBERS: Final = ("traits", "tools", "start", "restore", "delete", "close")


def check_environment(environment: object) -> None:
    """Raise InputError unless an object has what every environment has."""
    if lacks := [name for name in _MEMBERS if not hasattr(environment, name)]:
        raise InputError(
            f"{type(environment).__name__} is not an environment that treegen can fork, because "
            f"the class has no {', '.join(lacks)}; use MemoryEnvironment for a Python object"
        )


def call_key(call: ToolCall) -> str:
    """Return a text that equal calls share."""
    return json.dumps([call.name, call.arguments], sort_keys=True, ensure_ascii=False)


def check_observation(observation: object) -> None:
    """Raise WorldError unless a value is an observation that can be used."""
    if not isinstance(observation, Observation):
        raise WorldError(
            f"the environment returned {observation!r:.80}, which is not an Observation"
        )
    wrong = [
        name
        for name, kinds in _KINDS.items()
        if not isinstance(getattr(observation, name), kinds)
        or (isinstance(getattr(observation, name), bool) and bool not in kinds)
    ]
    if not wrong and observation.reward is not None and not math.isfinite(observation.reward):
        wrong = ["reward"]
    if not wrong and not all(isinstance(image, bytes) for image in observation.images):
        wrong = ["images"]
    if wrong:
        value = getattr(observation, wrong[0])
        raise WorldError(
            f"the environment returned an Observation whose {wrong[0]} is {value!r:.80}"
        )


def check_images(observation: Observation) -> None:
    """Raise WorldError unless all images of an observation can be decoded."""
    if not observation.images:
        return
    from treegen.prompts.images.loading import load_image, name_of, read_image

    for image in observation.images:
        try:
            load_image(read_image(image), name_of(image))
        except InputError as error:
            raise WorldError(
                f"the environment returned an image that cannot be used: {error}"
            ) from error


def describe_failure(error: Exception) -> str:
    """Return an error of an environment in one line, which is not empty."""
    text = " ".join(str(error).split())
    is_plain = text and isinstance(error, WorldError)
    return text if is_plain else f"{type(error).__name__}: {text}".rstrip(": ")


def observation_json(observation: Observation) -> dict[str, Any]:
    """Return an observation as a JSON object, without fields that are empty."""
    record: dict[str, Any] = {"text": observation.text}
    if observation.images:
        record["num_images"] = len(observation.images)
    for name in ("exit_status", "reward"):
        if (value := getattr(observation, name)) is not None:
            record[name] = value
    for name in ("is_done", "failure"):
        if value := getattr(observation, name):
            record[name] = value
    return record
