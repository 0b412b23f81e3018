"""Tasks whose problems are solved by tool calls in an environment."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.errors import InputError, arg
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.search.task import SearchTask
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import Verdict
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.search.environments.protocol import Environment, World
    from treegen.search.evaluate import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """What the environment of a run may use."""

    name: str
    """One of the task's `environments`. It may be followed by a colon and the name of a provider
    or a template."""
    execution: ExecutionOptions | None = None
    """Permission to run programs that a model wrote; None without it."""
    folder: Path | None = None
    """A directory of this run alone for worlds and snapshots that outlive the process; None for
    none. A resumed run removes what it does not need there."""

    @property
    def backend(self) -> str:
        """The name without what follows a colon."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Assessment:
    """The official score of an episode."""

    solved: bool
    """Whether the goal is reached."""
    scores: dict[str, Any] = field(default_factory=dict)
    """Further scores by name, such as the share of subgoals, as JSON values."""


class AgentTask(SearchTask):
    """A task whose problems are solved by tool calls in an environment.

    It also defines the abstract members `environments`, `make_environment` and `assess`. Texts say
    nothing about its states, so the members about texts have no use.
    """

    @property
    @abstractmethod
    def environments(self) -> tuple[str, ...]:
        """Names of the environments in which the task can run, the default first."""

    keep_snapshots: frozenset[str] = frozenset()
    """Names of the environments whose snapshots outlive the process."""
    scored_worlds: frozenset[str] = frozenset()
    """Names of the environments whose episodes are scored by `assess_world`, not by `assess`."""

    def load_for(self, options: TaskOptions, environment: str) -> TaskData:
        """Return the problems that can run in an environment; as `load` by default.

        Args:
            options: As for `load`.
            environment: The environment; see `EnvironmentOptions.name`.
        """
        return self.load(options)

    @abstractmethod
    def make_environment(self, data: TaskData, options: EnvironmentOptions) -> "Environment":
        """Return the environment of a run; its worlds start from the task's problems.

        Args:
            data: The loaded problems.
            options: What the environment may use.

        Raises:
            InputError: The environment needs a permission that it does not have.
        """

    @abstractmethod
    def assess(
        self, problem: Problem, actions: Sequence[ToolCall], environment: "Environment"
    ) -> Assessment:
        """Return the official score of an episode. It must not depend on the search.

        Args:
            problem: The problem.
            actions: All actions of the episode that ran, in order.
            environment: The environment of the run.
        """

    async def assess_world(
        self, problem: Problem, world: "World", environment: "Environment"
    ) -> Assessment:
        """Return the official score of an episode by its world; see `scored_worlds`.

        Args:
            problem: The problem.
            world: A copy of the world at the end of the episode, which may be changed.
            environment: The environment of the run.
        """
        raise NotImplementedError

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Raise InputError, because one text cannot solve a problem.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"the task {self.name} requires tool calls; use `treegen search {self.name}`"
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Raise InputError, because episodes are scored, and not texts.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.name} scores the results of tool calls, not texts; use treegen search"
        )

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the message that asks for the solution of a problem."""
        return problem.question

    def state(self, problem: Problem, text: str) -> str | None:
        """Return the text."""
        return text

    def done(self, problem: Problem, text: str) -> bool:
        """Return False: the environment or the model ends an episode."""
        return False

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return None: the state of the environment is the answer."""
        return None

    def is_solved(self, problem: Problem, text: str) -> bool:
        """Return False: a text solves nothing; see `assess`."""
        return False

    def evaluate(self, problem: Problem, how: str) -> "Evaluate":
        """Raise InputError, because the environment gives the rewards.

        Args:
            problem: The problem.
            how: Name of the way.

        Raises:
            InputError: Always.
        """
        raise InputError(f"{self.name} is evaluated by its environment; name an environment")


def check_execution(task: str, options: EnvironmentOptions) -> ExecutionOptions:
    """Return the permission to run programs.

    Args:
        task: Name of the task.
        options: The options of its environment.

    Raises:
        InputError: There is no permission.
    """
    if options.execution is None:
        raise InputError(
            f"the environment of {task} runs programs that the model wrote; allow it with "
            f"{arg('allow_code_execution', True)}"
        )
    return options.execution
