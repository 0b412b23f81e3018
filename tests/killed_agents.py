"""Runs of agents that may be killed.

A job has the run directory, whether it is resumed, whether snapshots outlive the process, and a
file in which every action is logged before it runs.
"""

import json
import os
import pickle
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agent_runs import load_job, run_job, walker

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.search.agent_task import EnvironmentOptions
from treegen.evals.task import TaskData
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Environment, Observation, Traits, call_key
from treegen.tasks.agents.tasks import TextWorldTask
from treegen.tasks.agents.text_world import TextWorld


class LoggedWorld:
    """A text world that takes its time, and logs the actions that it runs."""

    def __init__(self, world: TextWorld, log: str, name: str) -> None:
        self.world, self.log, self.name = world, log, name
        self.path: list[str] = []

    def run(self, action: ToolCall) -> Observation:
        line = json.dumps([self.name, self.path, call_key(action)]) + "\n"
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)
        time.sleep(0.002)
        if action.name not in self.world.pure_tools:
            self.path.append(call_key(action))
        return self.world.run(action)

    def observe(self) -> Observation:
        return self.world.observe()


class StoredWorld:
    """A world whose snapshots are files."""

    def __init__(self, world: LoggedWorld, folder: Path) -> None:
        self._world, self._folder = world, folder

    async def run(self, action: ToolCall) -> Observation:
        return self._world.run(action)

    async def observe(self) -> Observation:
        return self._world.observe()

    async def snapshot(self) -> str:
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(pickle.dumps(self._world))
        partial.rename(self._folder / name)
        return name

    async def close(self) -> None: ...


class StoredEnvironment:
    """An environment of logged worlds with snapshots in a directory."""

    traits = Traits(pure_tools=TextWorld.pure_tools)
    tools = TextWorld.tools

    def __init__(self, start: Any, folder: Path) -> None:
        self._start, self._folder = start, folder
        folder.mkdir(exist_ok=True)

    async def start(self, problem: Problem) -> StoredWorld:
        return StoredWorld(self._start(problem), self._folder)

    async def restore(self, snapshot: str) -> StoredWorld:
        try:
            data = (self._folder / snapshot).read_bytes()
        except FileNotFoundError:
            raise InputError(f"there is no snapshot {snapshot}") from None
        return StoredWorld(pickle.loads(data), self._folder)

    async def delete(self, snapshot: str) -> None:
        (self._folder / snapshot).unlink(missing_ok=True)

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        leftovers = [file for file in self._folder.iterdir() if file.name not in keep]
        for file in leftovers:
            file.unlink()
        return len(leftovers)

    async def close(self, keep: Collection[str] = ()) -> None: ...


class LoggedTask(TextWorldTask):
    """Text worlds whose actions are logged."""

    def __init__(self, log: str, *, stores: bool) -> None:
        super().__init__()
        self._log, self._stores = log, stores
        self.keep_snapshots = frozenset({"memory"} if stores else ())

    def make_environment(self, data: TaskData, options: EnvironmentOptions) -> Environment:
        def start(problem: Problem) -> LoggedWorld:
            return LoggedWorld(self._start(problem), self._log, problem.id)

        if self._stores:
            assert options.folder is not None
            return StoredEnvironment(start, options.folder)
        return MemoryEnvironment(start, TextWorld.tools, pure_tools=TextWorld.pure_tools)


def run(job: dict[str, Any]) -> None:
    """Run or resume the searches of a job."""
    search = load_job(
        LoggedTask(job["log"], stores=job["stores"]),
        job["method"],
        extra={"problems": "4"},
        width=2,
        expand=3,
        num_samples=3,
        depth=25,
        budget={"actions": 60},
    )
    run_job(search, walker(0.4), Path(job["path"]), resume=job["resume"])
