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
from treegen.evals.task import TaskData
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.search.environments.protocol import Environment
    from treegen.search.evaluate import Evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """What the environment of a run may use."""

    name: str
    """One of the task's `environments`."""
    execution: ExecutionOptions | None = None
    """Permission to run programs that a model wrote; None without it."""
    folder: Path | None = None
    """A directory for worlds and snapshots that outlive the process; None for none."""


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

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Raise InputError, because one text cannot solve a problem.

        Raises:
            InputError: Always.
        """
        raise InputError(f"{self.name} is solved by tool calls; run `treegen search {self.name}`")

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
        raise InputError(f"{self.name} is evaluated by its environment; search it with one")


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
