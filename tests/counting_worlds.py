"""Worlds that count, with a journal of their actions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_policies import call

from treegen.errors import InputError, WorldError
from treegen.evals.problem import Problem
from treegen.evals.search.action_journal import ActionJournal, Episode
from treegen.evals.search.journaled_environment import JournaledEnvironment
from treegen.prompts.replies.types import ToolCall
from treegen.runs import open_for_append
from treegen.search.environments.protocol import Observation, Traits

EPISODE = Episode("a search", Problem("p", "", ""))


class Counter:
    """A world that counts; `ran` has all actions that any of them has run."""

    def __init__(self, environment: Counters, number: int = 0) -> None:
        self.environment, self.number = environment, number

    async def run(self, action: ToolCall) -> Observation:
        self.environment.ran.append(f"{self.number}{action.name}")
        if action.name == "add":
            self.number += 1
        text = f"{self.environment.word} {self.number}"
        image = bytes([self.number])
        return Observation(text=text, images=(image,), exit_status=0, is_done=self.number > 8)

    async def observe(self) -> Observation:
        self.environment.ran.append(f"{self.number}?")
        return Observation(text=f"at {self.number}", reward=self.number / 10)

    async def snapshot(self) -> str:
        if not self.environment.traits.has_snapshots:
            raise WorldError("no snapshots")
        name = f"s{secrets.token_hex(4)}-{self.number}"
        self.environment.stored[name] = self.number
        return name

    async def close(self) -> None:
        self.environment.ran.append("close")


class Counters:
    """An environment whose snapshots are in a dictionary of the test."""

    tools = ()

    def __init__(self, stored: dict[str, int], *, has_snapshots: bool = True) -> None:
        self.stored, self.ran, self.word = stored, list[str](), "now"
        self.traits = Traits(has_snapshots=has_snapshots, pure_tools=frozenset({"look"}))

    async def start(self, problem: Problem) -> Counter:
        assert problem.id == "p"
        return Counter(self)

    async def restore(self, snapshot: str) -> Counter:
        if snapshot not in self.stored:
            raise InputError(f"no snapshot {snapshot}")
        return Counter(self, self.stored[snapshot])

    async def delete(self, snapshot: str) -> None:
        self.stored.pop(snapshot, None)

    async def close(self) -> None: ...


@contextmanager
def opened(
    folder: Path, inner: Counters, *, keeps: bool, seconds: float = 60.0
) -> Iterator[JournaledEnvironment]:
    with open_for_append(folder / "actions.jsonl", "actions.lock") as file:
        journal = ActionJournal(file)
        yield JournaledEnvironment(inner, journal, keeps_snapshots=keeps, max_seconds=seconds)


async def act(environment: JournaledEnvironment, *names: str) -> list[str]:
    world = await environment.start(EPISODE)
    texts = []
    for name in names:
        shown = await (world.observe() if name == "?" else world.run(call(name)))
        texts.append(shown.text)
    await world.close()
    return texts
