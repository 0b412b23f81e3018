"""The task harbor: task folders of Harbor, scored by their own tests.

In containers (inspect:docker and e2b), tests run as Harbor runs them: tests/ is copied to /tests,
bash runs /tests/test.sh in the working directory, and /logs/verifier has the reward. Elsewhere,
absolute paths of a task do not exist. So a task can run there only if its test is one Python
program without such paths.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.errors import DataError, InputError, WorldError, arg
from treegen.evals.arguments import check_arguments
from treegen.evals.problem import Problem, Skipped
from treegen.evals.search.agent_task import AgentTask, Assessment, EnvironmentOptions
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskOptions
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.file_tools import FileWorld, ToolError
from treegen.search.environments.protocol import Environment, World
from treegen.tasks.agents import BACKENDS, open_backend
from treegen.tasks.agents.dockerfile import copied_files
from treegen.tasks.agents.harbor import (
    HarborTask,
    as_problem,
    check_image,
    python_test,
    read_folder,
)
from treegen.tasks.agents.tasks import GameTask
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.environments.local import LocalWorld

_DIRECTORY: Final = "/app"
"""The working directory in sandboxes of E2B."""
_MAX_REWARD: Final = 1e9
"""Rewards are smaller than this; NaN is not."""
_RESET: Final = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier"
_TEST: Final = "/bin/bash --noprofile --norc /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
_NOT_INSIDE: Final = r"(?<![\w./:<})*])(?<!#!)"
"""What cannot come before an absolute path: parts of a path, a URL or a tag, and #! of scripts."""
_ROOTS: Final = "(?:app|tests|logs|tmp|root|home|etc|usr|var|opt|workspace)"
_ROOT_FILE: Final = rf"{_NOT_INSIDE}(?<![\"'])/[A-Za-z_][\w-]*(?:/[\w-]+)*\.\w+"
_OPENED: Final = r"(?:open|Path|exists|isfile|isdir)\(\s*[\"']/\w*"
# The working directory, which the model fills, must not be where the test's imports are from.
_PROGRAM: Final = """\
import sys
sys.path[:] = [{folder!r}] + [path for path in sys.path if path]
import runpy
sys.argv = [{path!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class _Setup:
    """How a task runs in an environment."""

    task: HarborTask
    files: Mapping[str, bytes]
    """The first files of a world, relative to the working directory."""
    program: str | None = None
    """The Python program that is the test, in tests/; None if test.sh runs in a container."""


class Harbor(AgentTask, TextTask):
    """Task folders of Harbor."""

    name = "harbor"
    needs_data = "a task folder, or a folder of task folders"
    filters = ("solved",)
    environments = tuple(BACKENDS)
    keep_snapshots = scored_worlds = frozenset(BACKENDS)
    defaults = GameTask.defaults
    search_defaults = GameTask.search_defaults
    arguments: ClassVar[Mapping[str, str]] = {}

    def __init__(self) -> None:
        self._setups: dict[str, _Setup] = {}

    def load(self, options: TaskOptions) -> TaskData:
        """Return the problems that can run in the environment `local`; see `load_for`."""
        return self.load_for(options, "local")

    def load_for(self, options: TaskOptions, environment: str) -> TaskData:
        """Return the problems of a folder that can run in an environment.

        Args:
            options: The folder, and which problems to take.
            environment: The environment.

        Raises:
            InputError: No folder is named, or an option is invalid.
            DataError: No task can be read, or none can run in the environment.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.check_no_examples(options)
        if options.data is None or options.split is not None:
            raise InputError(
                f"harbor has no bundled tasks and no splits; set {arg('data=')} to a task folder "
                "or to a folder of task folders, without a split"
            )
        tasks, skipped = read_folder(Path(options.data))
        last = DataError("no Harbor task was found")
        self._setups = {}
        for task in tasks:
            try:
                self._setups[task.name] = _prepare(replace(task, backend=environment))
            except DataError as error:
                reason, _, _ = str(error).partition(";")
                skipped.append(Skipped(str(task.folder / "task.toml"), 1, reason))
                last = error
        if not self._setups:
            raise last
        problems = [as_problem(setup.task) for setup in self._setups.values()]
        return TaskData(select(problems, options), options.data, skipped=tuple(skipped))

    def make_environment(self, data: TaskData, options: EnvironmentOptions) -> Environment:
        """Return the environment in which the agent works.

        Raises:
            InputError: Programs may not run, or the environment cannot be used.
        """
        more: dict[str, Any] = {}
        if _has_images(options.name):
            more["config"] = lambda problem: str(
                self._setups[problem.id].task.folder / "environment" / "Dockerfile"
            )
        elif options.backend == "e2b":
            seconds = max(setup.task.verifier_seconds for setup in self._setups.values())
            more = {"directory": _DIRECTORY, "user": "root"}
            more["timeout"] = max(600, 2 * math.ceil(seconds))
        return open_backend(self.name, options, lambda p: self._setups[p.id].files, **more)

    def assess(
        self, problem: Problem, actions: Sequence[ToolCall], environment: Environment
    ) -> Assessment:
        """Raise InputError, because the world decides, and not the actions; see `assess_world`.

        Args:
            problem: The problem.
            actions: The actions of an episode.
            environment: The environment of the run.
        """
        raise InputError(
            "harbor scores the files at the end of an episode, not the actions; use assess_world"
        )

    async def assess_world(
        self, problem: Problem, world: World, environment: Environment
    ) -> Assessment:
        """Run the task's own tests in a world, and return their reward.

        Args:
            problem: The problem.
            world: The world.
            environment: The environment of the run; not used.

        Raises:
            WorldError: The tests cannot be run.
        """
        assert isinstance(world, FileWorld)
        setup = self._setups[problem.id]
        if setup.program is None:
            scores = await _run_in_container(world, setup.task)
        else:
            scores = await _run_program(world, setup.task, setup.program)
        rewards = [value for value in scores.values() if not isinstance(value, str)]
        reward = scores.get("reward", min(rewards, default=0.0))
        return Assessment(not isinstance(reward, str) and reward >= 1, scores)


def _has_images(environment: str) -> bool:
    """Return whether an environment builds images from Dockerfiles."""
    return environment in ("inspect", "inspect:docker")


def _prepare(task: HarborTask) -> _Setup:
    """Return how a task runs in its environment.

    Raises:
        DataError: It cannot.
    """
    if _has_images(task.backend):
        check_image(task)
        return _Setup(task, {})
    files, workdir = copied_files(task)
    if task.backend.startswith("e2b"):
        if workdir != _DIRECTORY:
            raise task.refuse(f"its working directory must be {_DIRECTORY}, got {workdir}")
        if "test.sh" not in task.tests:
            raise task.refuse("tests/test.sh is missing")
        return _Setup(task, files)
    program = python_test(task, workdir)
    tests = (data.decode("utf-8", "replace") for p, data in task.tests.items() if p != "test.sh")
    for text in (task.instruction, *tests):
        if path := _absolute_path(text, workdir):
            raise task.refuse(
                f"its instruction or tests contain absolute paths, such as {path:.60}"
            )
    return _Setup(task, files, program)


def _absolute_path(text: str, workdir: str) -> str | None:
    """Return an absolute path in a text; None if there is none.

    URLs, closing tags, comments, fractions and relative paths are no absolute paths. In quotes,
    which may hold the path of a URL, only well-known directories and arguments of functions are.
    """
    workdir_pattern = "" if workdir == "/" else rf"|{re.escape(workdir[1:])}(?![\w-])"
    for pattern in (rf"{_NOT_INSIDE}/(?:{_ROOTS}\b{workdir_pattern})", _ROOT_FILE, _OPENED):
        if match := re.search(pattern, text):
            return match[0]
    return None


async def _run_program(world: FileWorld, task: HarborTask, program: str) -> dict[str, Any]:
    """Run a test that is a Python program, whose exit status is the reward."""
    folder = f".tests-{secrets.token_hex(8)}"
    await _write_tests(world, task, folder)
    path = f"{folder}/{program}"
    command = f"python3 '{path}'"
    if isinstance(world, LocalWorld):
        above = path.rpartition("/")[0]
        command = _PROGRAM.format(folder=above, path=path)
    observation = await world.execute(command, task.verifier_seconds)
    scores: dict[str, Any] = {
        "reward": float(observation.exit_status == 0 and not observation.failure)
    }
    return scores | ({"failure": observation.failure} if observation.failure else {})


async def _run_in_container(world: FileWorld, task: HarborTask) -> dict[str, Any]:
    """Run test.sh as Harbor does, and return the rewards that it has written."""
    reset = await world.execute(_RESET)
    if reset.exit_status:
        raise WorldError(
            f"the tests could not be copied: {reset.text[-200:]}; use an image with bash"
        )
    await _write_tests(world, task, "/tests")
    observation = await world.execute(_TEST, task.verifier_seconds)
    if observation.failure:
        return {"reward": 0.0, "failure": observation.failure}
    try:
        data = (await world.read_file("/logs/verifier/reward.txt")).decode()
        rewards: Any = {"reward": float(data)}
    except ToolError:
        try:
            rewards = json.loads(await world.read_file("/logs/verifier/reward.json"))
        except ToolError:
            return {"reward": 0.0, "failure": "test.sh has written no reward"}
        except (ValueError, RecursionError):
            rewards = None
    except ValueError:
        rewards = None
    if not isinstance(rewards, dict) or not all(
        isinstance(reward, int | float) and -_MAX_REWARD < reward < _MAX_REWARD
        for reward in rewards.values()
    ):
        return {"reward": 0.0, "failure": "the reward that test.sh has written is no number"}
    return rewards


async def _write_tests(world: FileWorld, task: HarborTask, folder: str) -> None:
    try:
        for path, data in task.tests.items():
            await world.write_file(f"{folder}/{path}", data)
    except ToolError as error:
        raise WorldError(f"the tests could not be written: {error}; free disk space") from None
