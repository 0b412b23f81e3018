"""The repair puzzle in worlds of files and commands.

The model's files are read from the world, and their tests run in treegen's sandbox. So no test is
in the world, wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.file_tools import FileWorld, ToolError
from treegen.search.environments.memory import in_daemon
from treegen.search.environments.protocol import (
    Environment,
    LastingEnvironment,
    Observation,
    Traits,
)
from treegen.tasks.agents.repair import CaseRunner, RepairGame, RepairPuzzle

_TOOLS: Final = tuple(
    tool for tool in RepairGame.tools if tool["function"]["name"] in ("run_tests", "submit")
)
_MAX_BYTES: Final = 100_000
"""Maximum size of a file; a larger one counts as empty."""


class RepairFiles:
    """Worlds of another environment, with the tools and rewards of the repair puzzle.

    Attributes:
        inner: The other environment.
        runner: Runs the tests.
    """

    def __init__(
        self, inner: Environment, runner: CaseRunner, puzzles: Mapping[str, RepairPuzzle]
    ) -> None:
        """Create an environment without worlds.

        Args:
            inner: An environment whose worlds are `FileWorld`s.
            runner: Runs the tests. `close` closes it.
            puzzles: The puzzle of each problem, by the problem's id.
        """
        self.inner, self.runner, self._puzzles = inner, runner, puzzles

    @property
    def traits(self) -> Traits:
        """Those of the other environment."""
        traits = self.inner.traits
        return replace(traits, pure_tools=traits.pure_tools | {"run_tests"})

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools of the other environment, and those that run the tests and end the work."""
        return (*self.inner.tools, *_TOOLS)

    async def start(self, problem: Problem) -> RepairWorld:
        """Return a new world with the files of a puzzle."""
        return await self._wrap(problem.id, await self.inner.start(problem))

    async def restore(self, snapshot: str) -> RepairWorld:
        """Return a new world in the state of a snapshot.

        Raises:
            InputError: There is no such snapshot.
        """
        inner, _, problem = snapshot.partition(" ")
        if problem not in self._puzzles:
            raise InputError(f"there is no snapshot {snapshot!r:.80}; replay the actions")
        return await self._wrap(problem, await self.inner.restore(inner))

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot. An unknown id does nothing."""
        await self.inner.delete(snapshot.partition(" ")[0])

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        """Remove what earlier processes have left; see `LastingEnvironment`."""
        if not isinstance(self.inner, LastingEnvironment):
            return 0
        return await self.inner.remove_leftovers(_inner_ids(keep))

    async def close(self, keep: Collection[str] = ()) -> None:
        """Close the other environment but for snapshots to keep, and the sandbox of the tests."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(in_daemon, self.runner.close)
            if isinstance(self.inner, LastingEnvironment):
                await self.inner.close(_inner_ids(keep))
            else:
                await self.inner.close()

    async def _wrap(self, problem: str, world: Any) -> RepairWorld:
        assert isinstance(world, FileWorld)
        return RepairWorld(self, world, problem, self._puzzles[problem])


def _inner_ids(snapshots: Collection[str]) -> list[str]:
    return [snapshot.partition(" ")[0] for snapshot in snapshots]


class RepairWorld:
    """One world. `RepairFiles` creates it."""

    def __init__(
        self, environment: RepairFiles, world: Any, problem: str, puzzle: RepairPuzzle
    ) -> None:
        self._environment, self._world = environment, world
        self._problem, self._puzzle = problem, puzzle
        self._is_submitted = False

    async def run(self, action: ToolCall) -> Observation:
        """Run an action, and return what it shows with the share of public tests that pass."""
        if self._is_submitted:
            return await self._judge(Observation(text="The episode is over."))
        match action.name:
            case "run_tests":
                game = await self.game()
                return Observation(text=await in_daemon(game.do_run_tests))
            case "submit":
                self._is_submitted = True
                return await self._judge(Observation(text="Submitted."))
        shown: Observation = await self._world.run(action)
        is_pure = action.name in self._environment.inner.traits.pure_tools
        return shown if is_pure or shown.failure else await self._judge(shown)

    async def observe(self) -> Observation:
        """Return the list of files, and the share of public tests that pass."""
        return await self._judge(await self._world.observe())

    async def snapshot(self) -> str:
        """Store the state, and return the id of the snapshot."""
        return f"{await self._world.snapshot()} {self._problem}"

    async def close(self) -> None:
        """Close the world."""
        await self._world.close()

    async def game(self) -> RepairGame:
        """Return the puzzle with the files as they are in the world; a missing file is empty."""
        files = {}
        for path in self._puzzle.files:
            try:
                data = await self._world.read_file(path)
            except ToolError:
                data = b""
            files[path] = data.decode("utf-8", "replace") if len(data) <= _MAX_BYTES else ""
        return RepairGame(files, self._puzzle.public, self._environment.runner)

    async def _judge(self, shown: Observation) -> Observation:
        game = await self.game()
        reward = await in_daemon(lambda: game.reward)
        return replace(shown, reward=reward, is_done=self._is_submitted)
