"""What tree search needs of a task: a prompt, states, their values, and the ends of solutions."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.registry import adapt_task, find_missing, get_task, list_tasks
from treegen.evals.task import Task, TaskData

if TYPE_CHECKING:
    from treegen.search.evaluate import Evaluate
    from treegen.search.propose import Propose


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchDefaults:
    """How a task is searched if the user does not choose."""

    method: str
    """The name of a search method, such as "beam"."""
    tokens: int
    """Maximum number of decoded tokens per problem; `--budget` replaces it."""
    depth: int
    """Maximum number of steps of a solution."""
    width: int
    """Number of states to keep, as `--width`."""
    expand: int
    """Number of next steps to make from a state, as `--expand`."""
    step: SamplingParams
    """How one step is sampled. A stop string, such as a newline, ends the step; with
    `include_stop` it is part of the text."""
    solution: SamplingParams
    """How a whole solution is sampled."""
    evaluator: str = "logprob"
    """The default way to evaluate states: "logprob", "min-logprob" or a name of `evaluate`."""
    max_value: float = 1.0
    """The value of the best state in the task's own ways to evaluate; the worst has 0."""
    propose: tuple[str, ...] = ()
    """Names of the task's own ways to make next steps, which its method `propose` returns. Empty if
    it has none; "sample" is always available."""
    evaluate: tuple[str, ...] = ()
    """Names of the task's own ways to evaluate states, which its method `evaluate` returns. Empty
    if it has none; "logprob", "min-logprob" and reward models are always available."""
    prune_below: float | None = None
    """`tot-dfs` prunes states with a lower value in the task's own ways to evaluate; None prunes
    none."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Values that some of the task's arguments must have in a search if the user gives them."""


class SearchTask(Task):
    """A task whose solutions consist of steps.

    It also defines the abstract members `search_defaults`, `root`, `state`, `done`, `answer` and
    `is_solved`. The other members have defaults: `checkable`, `instruction`, `propose` and
    `evaluate`.

    The text of a solution alone decides the state. It is the text after the prompt
    (`SearchNode.path_text`); for self-refine, it is the text of the last attempt.
    """

    @property
    @abstractmethod
    def search_defaults(self) -> SearchDefaults:
        """How the task is searched if the user does not choose."""

    @abstractmethod
    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the prompt that a solution continues."""

    @abstractmethod
    def state(self, problem: Problem, text: str) -> str | None:
        """Return the state of a text; equal if the same steps can follow, None for a dead end."""

    @abstractmethod
    def done(self, problem: Problem, text: str) -> bool:
        """Return whether a text is a whole solution, right or wrong."""

    @abstractmethod
    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the answer of a solution, in canonical form; None if it has none."""

    @abstractmethod
    def is_solved(self, problem: Problem, text: str) -> bool:
        """Return whether a text solves the problem. It must accept any text."""

    @property
    def checkable(self) -> bool:
        """Whether a problem alone decides if a text solves it, as a puzzle does.

        A search may then call `is_solved`, and ends with a correct solution. Otherwise `is_solved`
        needs the reference, and only scoring may call it.
        """
        return False

    def instruction(self, text: str) -> str:
        """Return the text to append to a solution for an instruction, such as one to check it."""
        return f"\n\n{text}\n"

    def propose(self, problem: Problem, how: str) -> "Propose":
        """Return a function that makes next steps in a way of `SearchDefaults.propose`."""
        raise InputError(f"task {self.name!r} does not support proposing steps with {how!r}")

    def evaluate(self, problem: Problem, how: str) -> "Evaluate":
        """Return a function that evaluates nodes in a way of `SearchDefaults.evaluate`.

        A higher value is better.
        """
        raise InputError(f"task {self.name!r} does not support evaluating states with {how!r}")


def get_search_task(name: str | Task) -> SearchTask:
    """Return a new task that can be searched.

    Raises:
        InputError: there is no such task, or it cannot be searched.
    """
    task = get_task(name)
    if find_missing(task, SearchTask):
        known = [info.name for info in list_tasks() if info.source == "treegen"]
        able = [other for other in known if isinstance(get_task(other), SearchTask)]
        raise InputError(
            f"task {task.name!r} cannot be searched, because it has no steps; tasks with steps: "
            f"{', '.join(able)}"
        )
    searched: SearchTask = adapt_task(task, SearchTask)
    for member in ("propose", "evaluate"):
        ways = getattr(searched.search_defaults, member)
        if ways and getattr(type(searched), member) is getattr(SearchTask, member):
            raise InputError(
                f"task {task.name!r} names ways to {member} ({', '.join(ways)}) in its "
                f"search_defaults, but has no method {member!r} that makes them"
            )
    return searched
