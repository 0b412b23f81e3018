"""What tree search needs of a task: a prompt, states, what they are worth, and when it is over."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.registry import get_task, list_tasks
from treegen.evals.task import Task, TaskData
from treegen.params import SamplingParams

if TYPE_CHECKING:
    from treegen.search.evaluate import Evaluate
    from treegen.search.propose import Propose


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchDefaults:
    """How a task is searched when the user does not say.

    method: one of `treegen.evals.search.methods.METHODS`. tokens: decoded tokens per problem.
    depth: steps of a solution at most. width: states kept at a time. expand: next steps tried in
    a state. step, whole: how one step, and a whole solution, are sampled.
    propose, evaluate: the task's own ways to make next steps and to judge states, beside those
    that every task has (see `names.py`); a task that names some is also a Proposer or Evaluator.
    evaluator: the way to judge that is used when the user names none.
    worth: what the best state is worth in the task's own ways, the worst being worth 0.
    prune_below: what depth-first search does not look into, on the scale of that way.
    """

    method: str
    tokens: int
    depth: int
    width: int
    expand: int
    step: SamplingParams
    whole: SamplingParams
    evaluator: str
    worth: float = 1.0
    propose: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    prune_below: float | None = None


@runtime_checkable
class SearchTask(Task, Protocol):
    """A task whose solutions are made of steps.

    A state is known by the text after the prompt (`SearchNode.path_text`) alone. `checkable` says
    that a problem itself tells whether a text solves it, as a puzzle does: a search may then ask
    `solved`, and ends there. Elsewhere that takes the reference, and is for the score alone.
    """

    @property
    def search_defaults(self) -> SearchDefaults: ...

    @property
    def checkable(self) -> bool: ...

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the prompt that a solution continues."""
        ...

    def state(self, problem: Problem, text: str) -> str | None:
        """Return what a text has come to, equal where the same can follow; None: a dead end."""
        ...

    def done(self, problem: Problem, text: str) -> bool:
        """Return whether a text is a whole solution, right or wrong."""
        ...

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the answer that a solution comes to, in canonical form; None if it has none."""
        ...

    def solved(self, problem: Problem, text: str) -> bool:
        """Return whether a text solves the problem; any text must do."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """A task that has ways of its own to make next steps: `SearchDefaults.propose` names them."""

    def propose(self, problem: Problem, how: str) -> "Propose":
        """Return what makes next steps in one of the task's own ways."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """A task that has ways of its own to judge states: `SearchDefaults.evaluate` names them."""

    def evaluate(self, problem: Problem, how: str) -> "Evaluate":
        """Return what judges nodes in one of the task's own ways; more is better."""
        ...


_OPTIONAL: Final = {"propose": Proposer, "evaluate": Evaluator}


def get_search_task(name: str) -> SearchTask:
    """Return a new task that can be searched.

    Raises:
        InputError: there is none, or it cannot be searched.
    """
    task = get_task(name)
    if isinstance(task, SearchTask):
        for member, protocol in _OPTIONAL.items():
            ways = getattr(task.search_defaults, member)
            if ways and not isinstance(task, protocol):
                raise InputError(
                    f"task {task.name!r} names ways to {member} ({', '.join(ways)}) in its "
                    f"search_defaults, but has no method {member!r} that makes them"
                )
        return task
    known = [info.name for info in list_tasks() if info.source == "treegen"]
    able = [each for each in known if isinstance(get_task(each), SearchTask)]
    raise InputError(
        f"task {task.name!r} has no steps to search over; those that have: {', '.join(able)}"
    )
