"""The tasks text-world and repair: problems from a level and a seed."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

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
from treegen.evals.verdict import Verdict
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.memory import MemoryEnvironment, in_daemon
from treegen.search.environments.protocol import Environment, World
from treegen.tasks.agents import repair, text_world
from treegen.tasks.agents.backends import BACKENDS, open_backend
from treegen.tasks.agents.game import ToolGame
from treegen.tasks.agents.repair_files import RepairFiles, RepairWorld
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.sandbox import SandboxPool

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
        whole=SamplingParams(temperature=0.7, max_tokens=512),
        evaluator="environment",
        evaluate=("environment",),
    )
    arguments: ClassVar[Mapping[str, str]] = {
        "level": "easy, medium, hard or all; default: all, in turn",
        "problems": f"number of problems; default: {_NUM_PROBLEMS}",
        "problem_seed": "decides the problems; default: 0",
    }

    def load(self, options: TaskOptions) -> TaskData:
        """Return the problems of a seed.

        Raises:
            InputError: An option is invalid.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.check_no_examples(options)
        if options.data is not None or options.split is not None:
            raise InputError(f"{self.name} generates its problems; leave out data and split")
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

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Raise InputError, because episodes are scored, and not texts.

        Raises:
            InputError: Always; use `assess`.
        """
        raise InputError(f"{self.name} scores the results of tool calls, not texts")


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
