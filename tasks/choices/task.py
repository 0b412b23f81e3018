"""Base class of the tasks with choices: data, examples, prompts, accuracy.

Prompts and scores are those of lm-eval's tasks of the same names: each choice is scored after one
space, `acc` uses the log-likelihood, and `acc_norm` the log-likelihood per character.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.fewshot import pick_examples
from treegen.tasks.common.files import Rows
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.problems import problems_of
from treegen.tasks.common.sources import Source
from treegen.tasks.common.text_task import TextTask, select_task_data, with_examples


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, the texts to choose from, and the index of the right one."""

    id: str
    """Its id in the data; empty if it has none."""
    prompt: str
    """The text before the choices; empty if each choice has its own."""
    choices: tuple[str, ...]
    """The texts to choose from, as in the data."""
    gold: int
    """The index of the right choice, from 0."""
    rest: str | None = None
    """A text that follows every choice. If there is one, it is scored after each choice. Otherwise
    the choices are scored after the prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Fields that reports may show."""

    def problem(self, id: str) -> Problem:
        """Return the item as a problem. lm-eval puts one space before each scored text."""
        metadata = dict(self.metadata)
        if self.rest is None:
            scored = tuple(f" {choice}" for choice in self.choices)
            return Problem(id, self.prompt, scored[self.gold], metadata, scored)
        scored = (f" {self.rest}",) * len(self.choices)
        right = f"{self.choices[self.gold]}{scored[0]}"
        return Problem(id, self.prompt, right, metadata, scored, openings=self.choices)

    @property
    def turn(self) -> Turn:
        """The item as a solved example: the prompt, and the answer after it."""
        right = self.choices[self.gold]
        if self.rest is None:
            return self.prompt, right
        return f"{self.prompt}{right}", self.rest


def id_of(row: Mapping[str, Any], field: str) -> str:
    """Return the id in a field of a row as text, also if it is 0; empty if there is none."""
    value = row.get(field)
    return "" if value is None else str(value)


def check(item: ChoiceItem) -> ChoiceItem:
    """Return an item that has been checked.

    Raises:
        ValueError: The right choice is not among the choices, or two choices are equal.
    """
    if len(item.choices) < 2:
        raise ValueError("it needs two choices or more")
    if len(set(item.choices)) < len(item.choices):
        raise ValueError("two of its choices are equal; change or remove one")
    if not 0 <= item.gold < len(item.choices):
        raise ValueError("the right choice must be among its choices")
    return item


def texts_of(values: Any, name: str) -> tuple[str, ...]:
    """Return a list of texts; raise ValueError if it is not a list or a text is invalid."""
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a list")
    return tuple(text_field({name: value}, name) for value in values)


def place(value: Any, name: str) -> int:
    """Return a whole number that may be written as text; raise ValueError for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} is {value!r:.40}, not a whole number: the split may have no answers")


class ChoiceTask(TextTask):
    """A question whose answer is the likeliest of given texts.

    Subclasses define a name, a source, their published metrics, and a method that makes an item
    from a row.
    """

    source: ClassVar[Source]
    metrics: ClassVar[tuple[str, ...]] = ("acc", "acc_norm")
    filters = ("none",)
    # Nothing is sampled. The only sample of a problem is its likeliest choice.
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.0, max_tokens=1), num_samples=1, num_fewshot=0
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row; raise ValueError with the reason if it has none."""
        raise NotImplementedError

    def add_answers(self, rows: Rows, place: str) -> Rows:
        """Return rows with their answers, for data whose answers are in another file."""
        return rows

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples. A problem is never one of its own examples.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: The data cannot be read, or an example is a problem.
        """
        check_arguments(self.name, options.extra, ())
        rows, source = self.source.read(options.data, options.split)
        made = problems_of(self.add_answers(rows, source), source, self._problem, noun="question")
        data = select_task_data(*made, source, options)
        return with_examples(data, self._examples(options, data.problems))

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the chosen text is the right one."""
        return {"none": Verdict(text, text == problem.answer)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the published metrics of the task: `acc`, and for most tasks `acc_norm`."""
        report = self.overall(scores, options)
        rows = [
            replace(row, metric="acc") if row.metric == "exact_match" else row
            for row in report.metrics
        ]
        kept = tuple(row for row in rows if row.metric in self.metrics)
        return replace(report, metrics=kept, majority=())

    def _problem(self, row: dict[str, Any], line: int) -> Problem:
        item = self.item(row)
        return item.problem(item.id or f"{self.name}-{line - 1}")

    def _examples(self, options: TaskOptions, problems: Sequence[Problem]) -> list[Turn]:
        """Return the solved examples: the first of a file, or examples drawn by seed."""
        if options.num_fewshot is None and not (options.fewshot_file or options.fewshot_data):
            return []

        def read(rows: Rows, source: str) -> Rows:
            # Only the first rows of a file are read, because later rows may be unusable.
            first = options.num_fewshot if options.fewshot_file is not None else None
            return islice(self.add_answers(rows, source), first)

        items = pick_examples(
            options,
            {_key(problem): problem.id for problem in problems},
            None,
            self.item,
            self.source.train,
            key=lambda item: _key(item.problem("")),
            text=lambda item: f"{item.prompt}\n{item.choices}",
            read=read,
        )
        return [item.turn for item in items]


def _key(problem: Problem) -> tuple[str, tuple[str, ...]]:
    return problem.question, problem.candidates
