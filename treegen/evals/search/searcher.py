"""From a task and a method's name to an async function that searches one of its problems.

Each method (`methods.py`) is a strategy of `treegen.search` with the task's steps, evaluations and
ends. If the problems of a task can be checked, every method ends with its first correct solution,
and until then starts again from the root while its budget lasts.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar

from treegen.common.spelling import did_you_mean
from treegen.errors import CacheFullError
from treegen.evals.problem import Problem
from treegen.evals.search.custom_method import find_method
from treegen.evals.search.job import search_names
from treegen.evals.search.method_types import (
    REWARD,
    Method,
    MethodContext,
    TreeSettings,
    to_call_values,
)
from treegen.evals.search.settings import SearchSettings
from treegen.evals.search.task import SearchTask
from treegen.evals.task import TaskData
from treegen.evals.task_calls import wrap_task_method
from treegen.search.budget import BudgetReached, StopReason
from treegen.search.evaluate import Evaluate, mean_logprob, min_logprob
from treegen.search.propose import sample_step
from treegen.search.strategies.common import assess
from treegen.search.strategies.majority import vote
from treegen.search.tree.node import Search, SearchNode, is_ended
from treegen.search.tree.result import SearchOutcome

if TYPE_CHECKING:
    from treegen.model.scorers.verifier import Verifier

P = ParamSpec("P")
T = TypeVar("T")

SOLVED: Final = StopReason.SOLVED.value
PRUNED_REASON: Final = "wrong or leads nowhere"
POLL_SECONDS = 0.2
# Lower than the mean log-probability of any state that is not a dead end.
_DEAD_END_VALUE: Final = -1e6


@dataclass(frozen=True, slots=True)
class ValueFunction:
    """A way to evaluate states."""

    evaluate: Evaluate
    """Returns the values of nodes."""
    dead_end: float
    """The value of a dead end."""
    solved: float
    """The value of a correct solution."""
    chance: Callable[[float], float]
    """Maps a value to a scale from 0 to 1."""


def verifier_value_function(verifier: "Verifier", problems: Mapping[str, Problem]) -> ValueFunction:
    """Return the evaluation of states by a verifier.

    Args:
        verifier: The verifier.
        problems: Problems by the names of searches.
    """
    from treegen.search.reward import by_verifier

    def question_of(node: SearchNode) -> str:
        # The few-shot examples are left out, because they say nothing about this solution.
        return problems[node.search.name].question

    judge = by_verifier(verifier, question_of=question_of)
    return ValueFunction(judge, 0.0, 1.0, lambda value: value)


def general_value_function(
    how: str,
    problems: Mapping[str, Problem],
    *,
    verifier_args: Mapping[str, Any] | None = None,
    memory: str | None = None,
) -> ValueFunction | None:
    """Return a way to evaluate states that every task has; None if it is one of the task's own.

    Args:
        how: The name of the way.
        problems: Problems by the names of searches.
        verifier_args: How a verifier is read.
        memory: The verifier's cache size.
    """
    if how.startswith(REWARD):
        from treegen.search.reward import MEMORY, load_verifier

        name = how.removeprefix(REWARD)
        verifier = load_verifier(name, memory=memory or MEMORY, **(verifier_args or {}))
        return verifier_value_function(verifier, problems)
    function = {"logprob": mean_logprob, "min-logprob": min_logprob}.get(how)
    if function is None:
        return None
    return ValueFunction(function, _DEAD_END_VALUE, 0.0, lambda value: math.exp(min(0.0, value)))


class TaskSearch:
    """Searches any of a task's problems, by the names of `job.search_names`.

    A search that runs out of memory returns the CacheFullError; its partial results do not count.
    Unpickled, this loads the value function again.
    """

    def __init__(
        self,
        task: SearchTask,
        data: TaskData,
        settings: SearchSettings,
        interrupted: Callable[[], object] = lambda: None,
        value_function: ValueFunction | None = None,
        method: Method | None = None,
    ) -> None:
        """Keep what the searches need.

        Args:
            task: The task.
            data: The task's problems.
            settings: The settings of the searches.
            interrupted: Called repeatedly during a search; if it returns a true value, the search
                is stopped.
            value_function: From `load_value_function`; by default it is loaded with the first
                search.
            method: The method; by default the one that the settings name.
        """
        self._task, self._data, self._settings = task, data, settings
        self._method = method or find_method(settings.place)
        self._problems = problems_of(data, settings)
        self._interrupted, self._value_function = interrupted, value_function

    @cached_property
    def _shared_value_function(self) -> ValueFunction | None:
        return self._value_function or load_value_function(self._data, self._settings)

    def __reduce__(self) -> tuple[Callable[..., "TaskSearch"], tuple[object, ...]]:
        # Only the sending process handles interrupts. A method from a file is sent too, because the
        # file may not exist on the worker.
        return partial(TaskSearch, method=self._method), (self._task, self._data, self._settings)

    async def __call__(self, root: SearchNode) -> SearchOutcome | CacheFullError:
        """Search the problem of a root."""
        watcher = asyncio.ensure_future(stop_when(self._interrupted, root.search))
        try:
            return await self._search(root, self._problems[root.search.name])
        except CacheFullError as error:
            return error
        finally:
            watcher.cancel()

    async def _search(self, root: SearchNode, problem: Problem) -> SearchOutcome:
        how = self._shared_value_function
        if how is None:  # one of the task's own ways to evaluate states
            best = self._task.search_defaults.max_value
            evaluate = self._task.evaluate(problem, self._settings.evaluate)
            how = ValueFunction(evaluate, 0.0, best, lambda value: value / best)
        return await Searcher(self._task, problem, self._settings, root, how, self._method).search()


def load_value_function(data: TaskData, settings: SearchSettings) -> ValueFunction | None:
    """Load a way to evaluate states that every task has; None for one of the task's own.

    A reward model takes memory. So it is loaded before the model that samples, which takes all the
    remaining memory.
    """
    return general_value_function(
        settings.evaluate,
        problems_of(data, settings),
        verifier_args=settings.verifier_args,
        memory=settings.verifier_memory,
    )


def problems_of(data: TaskData, settings: SearchSettings) -> dict[str, Problem]:
    """Return the problem of each search, by the search's name."""
    problems = {problem.id: problem for problem in data.problems}
    names = search_names(list(problems), settings.repeats)
    return {name: problems[problem_id] for name, (problem_id, _) in names.items()}


async def stop_when(interrupted: Callable[[], object], search: Search) -> None:
    """Stop a search once `interrupted` returns a true value."""
    while not interrupted():
        await asyncio.sleep(POLL_SECONDS)
    search.stop(StopReason.INTERRUPTED.value, StopReason.INTERRUPTED)


class Searcher:
    """A problem with the functions that strategies call; see `method_types.MethodContext`."""

    is_agent = False

    def __init__(
        self,
        task: SearchTask,
        problem: Problem,
        settings: SearchSettings,
        root: SearchNode,
        value_function: ValueFunction,
        method: Method,
    ) -> None:
        self.root, self.checkable = root, task.checkable
        self.settings: TreeSettings = settings
        self._task, self._problem, self._settings = task, problem, settings
        self._value, self._is_solved = value_function, False
        self._method = method
        self._arguments = to_call_values(method.arguments, settings.arguments)

    def __getattr__(self, name: str) -> NoReturn:
        # Authors of search methods know this object as `tools`.
        members = (*MethodContext.__annotations__, *vars(MethodContext))
        known = [member for member in members if not member.startswith("_")]
        raise AttributeError(f"`tools` has no {name!r}{did_you_mean(name, known)}")

    async def search(self) -> SearchOutcome:
        """Search until there is a correct solution, or once if the task cannot check solutions."""
        usage = self.root.search.usage
        while True:
            self._check()
            spent = usage.tokens_decoded
            outcome = await self._method.run(self, **self._arguments)
            correct = self._find_correct()
            if correct is not None:
                remaining = tuple(node for node in outcome.candidates if node is not correct)
                return replace(
                    outcome, best=correct, candidates=(correct, *remaining), stopped=SOLVED
                )
            if self._settings.choose == "vote" and not self._method.votes:
                outcome = await self._vote(outcome)
            again = self.checkable and self.root.search.stopped is None
            # Otherwise a second search would repeat the first.
            varies = self._settings.propose == "sample" and self._settings.step.temperature > 0
            if not again or usage.tokens_decoded == spent or not varies:
                return outcome
            self.root.search.restart += 1

    async def _vote(self, outcome: SearchOutcome) -> SearchOutcome:
        """Let the solutions vote, and evaluate those to which a user's method gave no value."""
        evaluate = self.chance if self._method.on_scale else self.evaluate
        with suppress(BudgetReached):
            await assess([node for node in outcome.candidates if node.value is None], evaluate)
        return vote(outcome, self.answer, self._weight)

    def _find_correct(self) -> SearchNode | None:
        """Return the first correct solution in the tree, if the task can check solutions.

        Nodes that are not pruned come first: a pruned one may be the duplicate of another.
        """
        # How far an interrupted search has come depends on timing, so it is not scored.
        stopped = self.root.search.stopped
        if not self.checkable or (stopped and stopped.by is StopReason.INTERRUPTED):
            return None
        # A user's method may have continued a solution.
        inner = self._method.source is not None
        nodes = [node for node in self.root.walk() if inner or node.is_leaf]
        nodes.sort(key=lambda node: node.pruned)
        return next((node for node in nodes if self._check_solved(node)), None)

    def _wrap(self, method: Callable[P, T]) -> Callable[P, T]:
        return wrap_task_method(method, self._task.name, self._problem.id)

    # The functions that strategies call

    def _text(self, node: SearchNode) -> str:
        """Return the text of the solution that ends with a node."""
        return node.path_text if self._method.joins_path else node.text

    def done(self, node: SearchNode) -> bool:
        """Return whether a node ends a solution."""
        return self._is_over(node) or self._wrap(self._task.done)(self._problem, self._text(node))

    def _is_over(self, node: SearchNode) -> bool:
        """Return whether the model ended the text, by a token or a stop string of solutions."""
        return is_ended(node) or node.stop in self._settings.solution.stops

    def is_solved(self, node: SearchNode) -> bool:
        """Return whether a node is a correct solution; False if the problem alone cannot decide."""
        return self.checkable and self._check_solved(node)

    def state(self, node: SearchNode) -> Hashable:
        """Return the state of a node, and whether the model has ended its text."""
        return self._wrap(self._task.state)(self._problem, self._text(node)), is_ended(node)

    def answer(self, node: SearchNode) -> str | None:
        """Return the answer of a solution; None if it has none."""
        return self._wrap(self._task.answer)(self._problem, self._text(node))

    def _weight(self, node: SearchNode) -> float:
        """Return the vote weight of a solution; 0 if the budget ended before it was evaluated."""
        if node.value is None:
            return 0.0
        return node.value if self._method.on_scale else self._value.chance(node.value)

    async def step(self, node: SearchNode, n: int) -> Sequence[SearchNode]:
        """Sample next steps, and prune those that lead nowhere."""
        self._check()
        how = self._settings.step
        draw = sample_step(how.stops, max_tokens=how.max_tokens)
        return self._prune_checked(await draw(node, n))

    async def finish(self, node: SearchNode, n: int) -> Sequence[SearchNode]:
        """Sample whole solutions from a node on, and prune those that are wrong.

        A node that ends a solution is its own solution.
        """
        self._check()
        return self._prune_checked([node] if self.done(node) else await node.sample(n))

    def instruct(self, node: SearchNode, text: str) -> SearchNode:
        """Append an instruction to a node, such as a request for feedback."""
        return node.extend(self._wrap(self._task.instruction)(text))

    async def propose(self, node: SearchNode) -> Sequence[SearchNode]:
        """Make next steps in the way named by the settings."""
        if self._settings.propose == "sample":
            return await self.step(node, self._settings.expand)
        self._check()
        way = self._wrap(self._task.propose)(self._problem, self._settings.propose)
        return self._prune_checked(await way(node))

    async def evaluate(self, nodes: Sequence[SearchNode]) -> list[float]:
        """Return the values of nodes; nodes that a check settles are not evaluated."""
        self._check()
        plain = {node: value for node in nodes if (value := self._settled_value(node)) is not None}
        self._is_solved |= self._value.solved in plain.values() and self.checkable
        unknown = [node for node in nodes if node not in plain]
        judged = dict(
            zip(unknown, await self._value.evaluate(unknown) if unknown else (), strict=True)
        )
        return [float(judged[node]) if node in judged else plain[node] for node in nodes]

    async def chance(self, nodes: Sequence[SearchNode]) -> list[float]:
        """Return values of nodes from 0 to 1."""
        return [self._value.chance(value) for value in await self.evaluate(nodes)]

    def _check(self) -> None:
        """Raise BudgetReached if the search has a correct solution or has used up its budget."""
        if self._is_solved and self._method.ends_early:
            self.root.search.stop(SOLVED, StopReason.SOLVED)
        self.root.search.check()

    def _prune_checked(self, nodes: Sequence[SearchNode]) -> list[SearchNode]:
        survivors = []
        for node in nodes:
            value = self._settled_value(node)
            if value == self._value.solved:
                node.value, self._is_solved = value, True
            if value == self._value.dead_end:
                node.value, node.pruned, node.pruned_because = value, True, PRUNED_REASON
                node.free()
            else:
                survivors.append(node)
        return survivors

    def _settled_value(self, node: SearchNode) -> float | None:
        """Return the value of a node that a check finds correct, wrong or a dead end, else None."""
        text, checkable = self._text(node), self.checkable
        if checkable and self._check_solved(node):
            return self._value.solved
        if self._wrap(self._task.done)(self._problem, text):
            return self._value.dead_end if checkable else None
        is_dead_end = self._wrap(self._task.state)(self._problem, text) is None
        return self._value.dead_end if is_dead_end or (checkable and self._is_over(node)) else None

    def _check_solved(self, node: SearchNode) -> bool:
        return node is not self.root and self._wrap(self._task.is_solved)(
            self._problem, self._text(node)
        )
