"""Tree searches for the next reply in chats that clients of a server send.

Each chat is the only problem of a task of its own, without a reference answer, so the settings and
the methods are those of `treegen search`. A step is a paragraph of the reply.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from treegen.common.params import SamplingParams
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg
from treegen.evals.problem import Problem
from treegen.evals.search.method_types import CHOOSE, TreeSettings, read_values
from treegen.evals.search.methods import METHODS, TEXT_METHODS, explain_unread, solution_text
from treegen.evals.search.searcher import (
    Searcher,
    ValueFunction,
    general_value_function,
    verifier_value_function,
)
from treegen.evals.search.settings import SearchSettings, resolve_search_settings
from treegen.evals.search.task import SearchDefaults, SearchTask
from treegen.evals.task import TaskData, TaskDefaults
from treegen.evals.verdict import Verdict
from treegen.model.scorers.verifier import Verifier
from treegen.search.budget import Budget
from treegen.search.tree.node import SearchNode
from treegen.search.tree.records import SearchTree
from treegen.search.tree.result import SearchOutcome
from treegen.tasks.answers.canonical import CanonicalAnswer, ChoiceAnswer, NumberAnswer, TextAnswer
from treegen.tasks.common.text_task import TextTask

ANSWERS: Final[Mapping[str, Callable[[], CanonicalAnswer]]] = {
    "text": TextAnswer,
    "number": NumberAnswer,
    "letter": lambda: ChoiceAnswer(26),
}
"""Ways to read the answer in a reply, for votes and for comparing answers."""

VERIFIER: Final = "verifier"
"""Value of the option `evaluate` that selects the server's verifier."""
_STEP_STOP: Final = "\n\n"
_STEP_TOKENS: Final = 256
_MAX_COUNT: Final = 2_000  # for any number in the options, so that no search blocks others long
_TREE: Final = tuple(field.name for field in fields(TreeSettings) if field.name != "propose")
_OPTIONS: Final = (*_TREE, "choose", "step_tokens", "step_stop", "answer")


class ChatTask(TextTask, SearchTask):
    """A chat as a task with one problem."""

    name = "chat"
    filters = ("answer",)

    def __init__(
        self,
        params: SamplingParams,
        *,
        step_stop: str,
        answer: CanonicalAnswer,
        instruction: Callable[[str], str],
    ) -> None:
        """Create the task.

        Args:
            params: Sampling parameters of a reply.
            step_stop: Text that ends a step.
            answer: Reads the answer of a reply.
            instruction: Returns the text between a reply and the next one for an instruction.
        """
        self._params, self._step_stop = params, step_stop
        self._read, self._instruction = answer, instruction

    @property
    def defaults(self) -> TaskDefaults:
        """16 replies."""
        return TaskDefaults(sampling=self._params, num_samples=16, num_fewshot=0)

    @property
    def search_defaults(self) -> SearchDefaults:
        """Steps are paragraphs."""
        step = replace(
            self._params,
            stop=(*_join_stops(self._step_stop, self._params.stops), self._step_stop),
            include_stop=True,
            max_tokens=_STEP_TOKENS,
        )
        return SearchDefaults(
            method="best-of-n",
            tokens=1,  # every search gets a budget
            depth=32,
            width=4,
            expand=4,
            step=step,
            solution=self._params,
            evaluator="logprob",
        )

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return nothing, because the chat is the prompt."""
        return ""

    def state(self, problem: Problem, text: str) -> str | None:
        """Return the reply so far; None if it is blank."""
        return text if text.strip() or not text else None

    def done(self, problem: Problem, text: str) -> bool:
        """Return whether the text contains a stop string of the reply, perhaps across steps."""
        return self.cut(text) != text

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the answer in a reply; None if there is none."""
        return self._read.read(self.cut(text))

    def cut(self, text: str) -> str:
        """Return a reply up to its first stop string."""
        stops = self._params.stops
        # Stop strings within the first min_tokens tokens do not count, and the text does not show
        # where these tokens end.
        if self._params.min_tokens:
            ends = [stop for stop in stops if text.endswith(stop)]
            return text.removesuffix(max(ends, key=len, default=""))
        starts = [start for stop in stops if (start := text.find(stop)) >= 0]
        return text[: min(starts, default=len(text))]

    def is_solved(self, problem: Problem, text: str) -> bool:
        """Return False, because a chat has no reference answer."""
        return False

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the answer in a reply. It never counts as right."""
        return {"answer": Verdict(self.answer(problem, text), False)}

    def instruction(self, text: str) -> str:
        """Return the text to append to a reply for an instruction, such as one to check it."""
        return self._instruction(text)


class ChatSearch:
    """The search of one chat.

    Attributes:
        params: Default sampling parameters of nodes.
        budget: The budget.
    """

    def __init__(
        self,
        task: ChatTask,
        problem: Problem,
        settings: SearchSettings,
        value_function: ValueFunction,
        params: SamplingParams,
        problems: dict[str, Problem],
    ) -> None:
        """Create the search.

        Args:
            task: The chat as a task.
            problem: The problem of the task.
            settings: The settings of the search.
            value_function: The evaluation of states.
            params: Sampling parameters of a reply.
            problems: The problems of running searches by search name. The search adds its problem
                while it runs, for a verifier.
        """
        self.params, self.budget = params, settings.budget
        self._task, self._problem, self._settings = task, problem, settings
        self._value_function, self._problems = value_function, problems

    async def __call__(self, root: SearchNode) -> SearchOutcome:
        """Search below the root."""
        searcher = Searcher(
            self._task,
            self._problem,
            self._settings,
            root,
            self._value_function,
            METHODS[self._settings.method],
        )
        self._problems[root.search.name] = self._problem
        try:
            return await searcher.search()
        finally:
            del self._problems[root.search.name]

    def text(self, tree: SearchTree, node: int) -> str:
        """Return the reply that ends with a node, without a stop string of the reply."""
        return self._task.cut(solution_text(self._settings.method, tree, node))

    def answer(self, text: str) -> str | None:
        """Return the answer in a reply; None if there is none."""
        return self._task.answer(self._problem, text)


class ChatSearches:
    """Prepares the searches of chats for a server; see `treegen.integrations.server.search`."""

    methods: tuple[str, ...] = TEXT_METHODS

    def __init__(self, verifier: Verifier | None = None) -> None:
        """Create an object that prepares searches.

        Args:
            verifier: Evaluates states, unless the client selects log-probabilities. Default:
                log-probabilities evaluate all states.
        """
        self._problems: dict[str, Problem] = {}
        self._verifier = None
        if verifier is not None:
            self._verifier = verifier_value_function(verifier, self._problems)

    def prepare(
        self,
        method: str,
        options: Mapping[str, Any],
        *,
        params: SamplingParams,
        budget: Budget,
        question: str,
        instruction: Callable[[str], str],
    ) -> ChatSearch:
        """Return the search of a chat.

        Args:
            method: One of `methods`.
            options: The client's options: `step_stop`, `step_tokens`, `answer`, `choose`, settings
                of the tree, and arguments of the method.
            params: Sampling parameters of a reply.
            budget: The budget.
            question: The text that a verifier reads as the question.
            instruction: Returns the text between a reply and the next one for an instruction.

        Raises:
            InputError: An option is unknown, or its value is invalid; the message names it.
        """
        names = [*_OPTIONS, *(argument.name for argument in METHODS[method].arguments)]
        for name in options:
            if name not in names:
                hint = did_you_mean(name[:80], names) or f"; known: {', '.join(names)}"
                raise InputError(f"method {method} has no option {name[:80]!r}{hint}")
        chosen = {name: value for name, value in options.items() if name in _OPTIONS}
        step_stop = chosen.get("step_stop", _STEP_STOP)
        if not isinstance(step_stop, str) or not 0 < len(step_stop) <= 100:
            raise InputError(
                f"{arg('step_stop')} must be a string of up to 100 characters, got "
                f"{step_stop!r:.60}"
            )
        task = ChatTask(
            params,
            step_stop=step_stop,
            answer=ANSWERS[_choice_option(chosen, "answer", "text", ANSWERS)](),
            instruction=instruction,
        )
        _check_counts(options)
        values = {name: v for name, v in chosen.items() if name not in ("step_stop", "answer")}
        evaluate = values.pop("evaluate", None)
        if evaluate is not None:
            evaluators = ("logprob", "min-logprob", *([VERIFIER] if self._verifier else []))
            _choice_option({"evaluate": evaluate}, "evaluate", "", evaluators)
        by_verifier = evaluate == VERIFIER or (evaluate is None and self._verifier is not None)
        _choice_option(values, "choose", "best", CHOOSE)
        settings = resolve_search_settings(
            {
                "task": task,
                "model": "served",
                "method": method,
                "arguments": _read_arguments(method, options),
                "budget": budget,
                "evaluate": evaluate if evaluate not in (None, VERIFIER) else "logprob",
                **values,
            }
        )
        _check_no_unused(method, [name for name, value in chosen.items() if value is not None])
        value_function = self._verifier if by_verifier else None
        value_function = value_function or general_value_function(settings.evaluate, {})
        assert value_function is not None
        problem = Problem("chat", question, "")
        return ChatSearch(task, problem, settings, value_function, params, self._problems)


def _join_stops(step_stop: str, stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings of a reply, and the texts that complete both one of them and a step.

    One token may complete a stop string and a step, such as a line break and a blank line. The
    string that starts first ends the text; of two that start at the same place, the first in the
    list. So the list also has each text in which a stop string of the reply begins within the end
    of a step or right after it.

    Args:
        step_stop: Text that ends a step.
        stops: The stop strings of a reply.
    """
    joined = (
        step_stop[:at] + stop
        for stop in stops
        for at in range(len(step_stop) + 1)
        if stop.startswith(step_stop[at:]) or step_stop[at:].startswith(stop)
    )
    return tuple(dict.fromkeys((*stops, *joined)))


def _check_no_unused(method: str, names: Sequence[str]) -> None:
    """Raise InputError for an option that a method does not read."""
    read = [name for name in METHODS[method].setting_names if name in _TREE]
    for name in names:
        reason = explain_unread(method, name, checkable=False)
        if name in _TREE and name not in read:
            reason = f"on {method}, which reads only {', '.join(read)}"
        if reason:
            raise InputError(f"{arg(name + '=')} has no effect {reason}")


def _check_counts(options: Mapping[str, Any]) -> None:
    """Raise InputError for a number above _MAX_COUNT."""
    for name, value in options.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value > _MAX_COUNT:
            raise InputError(f"{arg(name)} must be at most {_MAX_COUNT:,}, got {value}")


def _choice_option(
    options: Mapping[str, Any], name: str, default: str, valid: Mapping[str, Any] | Sequence[str]
) -> str:
    value = options.get(name, default)
    if not isinstance(value, str) or value not in valid:
        raise InputError(f"{arg(name)} must be one of {', '.join(valid)}, got {value!r:.60}")
    return value


def _read_arguments(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method among the options of a client."""
    values: dict[str, Any] = {}
    for argument in METHODS[method].arguments:
        if argument.name not in options:
            continue
        value = options[argument.name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        try:
            if not isinstance(value, str | int | float):
                raise InputError(f"it must be a string, a number, true or false, got {value!r:.60}")
            read = read_values([argument], {argument.name: text}, f"method {method}")
            if isinstance(value, str) and not isinstance(read[argument.name], str):
                raise InputError(
                    f"it must be a number, true or false, got the string {value!r:.60}"
                )
        except InputError as error:
            raise InputError(f"{arg(argument.name)} cannot be used: {error!s:.300}") from None
        _check_counts(read)
        values |= read
    return values
