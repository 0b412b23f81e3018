"""The tasks text-world and repair: problems from a level and a seed.

In worlds of files and commands, the model's files are read from the world, and their tests run in
treegen's sandbox. So no test is in the world, wherever it is.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.evals.arguments import check_arguments, one_of, whole_number
from treegen.evals.problem import Problem
from treegen.evals.search.agent_task import (
    AgentTask,
    Assessment,
    EnvironmentOptions,
    check_execution,
)
from treegen.evals.search.task import SearchDefaults
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.file_tools import FileWorld, ToolError
from treegen.search.environments.memory import MemoryEnvironment, ToolGame, in_daemon
from treegen.search.environments.protocol import (
    Environment,
    LastingEnvironment,
    Observation,
    Traits,
    World,
)
from treegen.tasks.agents import BACKENDS, open_backend, repair, text_world
from treegen.tasks.agents.repair import CaseRunner, RepairGame, RepairPuzzle
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.sandbox import SandboxPool

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

    def describe(self) -> list[str]:
        """Return lines for the user: those of the other environment, and the tests' sandbox."""
        lines: list[str] = getattr(self.inner, "describe", list)()
        return [*lines, *(line for line in self.runner.describe() if line not in lines)]

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
        observation: Observation = await self._world.run(action)
        is_pure = action.name in self._environment.inner.traits.pure_tools
        return observation if is_pure or observation.failure else await self._judge(observation)

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

    async def _judge(self, observation: Observation) -> Observation:
        game = await self.game()
        reward = await in_daemon(lambda: game.reward)
        return replace(observation, reward=reward, is_done=self._is_submitted)


_ALL: Final = "all"
_NUM_PROBLEMS: Final = 30


class GameTask(AgentTask, TextTask):
    """Games that a level and a seed decide, in memory by default."""

    filters = ("solved",)
    environments: tuple[str, ...] = ("memory",)
    groups = ("level",)
    levels: ClassVar[Sequence[str]]
    """The levels, the easiest first."""
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.7, max_tokens=512), num_samples=8, num_fewshot=0
    )
    search_defaults: Final = SearchDefaults(
        method="best-of-n",
        tokens=20_000,
        depth=30,
        width=4,
        expand=4,
        step=SamplingParams(temperature=0.7, max_tokens=512),
        solution=SamplingParams(temperature=0.7, max_tokens=512),
        evaluator="environment",
        evaluate=("environment",),
    )
    arguments: ClassVar[Mapping[str, str]] = {
        "level": "easy, medium, hard or all; default: all, by turns",
        "problems": f"number of problems; default: {_NUM_PROBLEMS}",
        "problem_seed": "seed of the problems; default: 0",
    }

    def load(self, options: TaskOptions) -> TaskData:
        """Return the problems of a seed.

        Raises:
            InputError: An option is invalid.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.check_no_examples(options)
        if options.data is not None or options.split is not None:
            raise InputError(f"{self.name} generates its problems; remove data and split")
        level = one_of(options.extra, "level", (*self.levels, _ALL), _ALL)
        num = whole_number(options.extra, "problems") or _NUM_PROBLEMS
        levels = self.levels if level == _ALL else (level,)
        seed = options.extra.get("problem_seed", "0")
        problems = [
            self._make(levels[number % len(levels)], f"{seed} {number}", number)
            for number in range(num)
        ]
        return TaskData(
            problems=select(problems, options), source=f"generated with problem_seed={seed}"
        )

    def _make(self, level: str, seed: str, number: int) -> Problem:
        content = json.dumps({"level": level, "seed": seed})
        name = f"{self.name}-{level}-{number}"
        return Problem(name, self.introduce(level, seed), content, {"level": level})

    @abstractmethod
    def introduce(self, level: str, seed: str) -> str:
        """Return the message that asks for the solution of a problem."""


class TextWorldTask(GameTask):
    """Rooms, things, and a goal."""

    name = "text-world"
    levels = tuple(text_world.LEVELS)
    arguments: ClassVar[Mapping[str, str]] = {
        **GameTask.arguments,
        "rewards": "dense (the share of subgoals) or sparse (only the goal); default: dense",
    }
    _is_dense = True

    def load(self, options: TaskOptions) -> TaskData:
        """Return the worlds of a seed."""
        self._is_dense = one_of(options.extra, "rewards", ("dense", "sparse"), "dense") == "dense"
        return super().load(options)

    def introduce(self, level: str, seed: str) -> str:
        """Return the goal and the first room."""
        return text_world.introduce(text_world.make_world(level, seed))

    def make_environment(self, data: TaskData, options: EnvironmentOptions) -> Environment:
        """Return an environment of worlds in memory."""
        world = text_world.TextWorld
        return MemoryEnvironment(self._start, world.tools, pure_tools=world.pure_tools)

    def assess(
        self, problem: Problem, actions: Sequence[ToolCall], environment: Environment
    ) -> Assessment:
        """Return whether the goal is reached, and the share of subgoals.

        Args:
            problem: The problem.
            actions: All actions of the episode.
            environment: The environment of the run; not used.
        """
        world = self._start(problem)
        replay(world, actions)
        return Assessment(world.is_solved, {"subgoals": world.share})

    def _start(self, problem: Problem) -> text_world.TextWorld:
        return text_world.make_world(**json.loads(problem.answer), is_dense=self._is_dense)


class RepairTask(GameTask):
    """Python files with bugs, public tests, and hidden tests that decide."""

    name = "repair"
    environments = ("memory", *BACKENDS)
    keep_snapshots = scored_worlds = frozenset(BACKENDS)
    levels = tuple(repair.LEVELS)

    def introduce(self, level: str, seed: str) -> str:
        """Return what is asked for, and the names of the files."""
        return repair.introduce(repair.make_puzzle(level, seed))

    def make_environment(self, data: TaskData, options: EnvironmentOptions) -> Environment:
        """Return an environment of files, whose tests run in the sandbox.

        Raises:
            InputError: Programs may not run, or the environment cannot be used.
        """
        execution = check_execution(self.name, options)
        pool = partial(
            SandboxPool, execution.sandbox, limits=repair.LIMITS, workers=execution.num_workers
        )
        if options.backend == "memory":
            return RepairEnvironment(pool())
        puzzles = {problem.id: _puzzle_of(problem) for problem in data.problems}
        inner = open_backend(self.name, options, lambda problem: puzzles[problem.id].files)
        return RepairFiles(inner, repair.CaseRunner(pool()), puzzles)

    def assess(
        self, problem: Problem, actions: Sequence[ToolCall], environment: Environment
    ) -> Assessment:
        """Return whether all hidden tests pass, and the shares of tests that do.

        Args:
            problem: The problem.
            actions: All actions of the episode.
            environment: The environment of the run, in whose sandbox the tests run.
        """
        assert isinstance(environment, RepairEnvironment)
        puzzle = _puzzle_of(problem)
        game = repair.RepairGame(dict(puzzle.files), puzzle.public, environment.runner)
        replay(game, [action for action in actions if action.name != "run_tests"])
        return _assess_files(problem, game)

    async def assess_world(
        self, problem: Problem, world: World, environment: Environment
    ) -> Assessment:
        """Return whether all hidden tests pass on the files of a world, and the shares that do.

        Args:
            problem: The problem.
            world: The world.
            environment: The environment of the run; not used.
        """
        assert isinstance(world, RepairWorld)
        return await in_daemon(_assess_files, problem, await world.game())


class RepairEnvironment(MemoryEnvironment):
    """Files in memory, and the sandbox in which their tests run.

    Attributes:
        runner: Runs the tests.
    """

    def __init__(self, pool: SandboxPool) -> None:
        game = repair.RepairGame
        self.runner = repair.CaseRunner(pool)
        super().__init__(self._start, game.tools, pure_tools=game.pure_tools)

    def _start(self, problem: Problem) -> repair.RepairGame:
        puzzle = _puzzle_of(problem)
        return repair.RepairGame(dict(puzzle.files), puzzle.public, self.runner)

    def describe(self) -> list[str]:
        """Return lines for the user: the sandbox and its gaps."""
        return self.runner.describe()

    async def close(self) -> None:
        """Close all worlds, and the sandbox once the tests that still run have ended."""
        try:
            await super().close()
        finally:
            await in_daemon(self.runner.close)


def _assess_files(problem: Problem, game: repair.RepairGame) -> Assessment:
    hidden = game.runner.run(game.files, _puzzle_of(problem).hidden)
    share = sum(result.passed for result in hidden) / len(hidden)
    return Assessment(share == 1.0, {"hidden_tests": share, "public_tests": game.reward})


def _puzzle_of(problem: Problem) -> repair.RepairPuzzle:
    return repair.make_puzzle(**json.loads(problem.answer))


def replay(game: ToolGame, actions: Sequence[ToolCall]) -> None:
    """Run the actions of an episode in a new game."""
    for action in actions:
        game.run(action)
