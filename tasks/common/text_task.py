"""Base class of most tasks: problems below few-shot examples, answered by text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn, with_turns
from treegen.evals.problem import Problem, Skipped
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions, summarize
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.task import Task, TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import SampleScore
from treegen.prompts.images.loading import ImageFile, is_image
from treegen.prompts.tree import Message, Node
from treegen.tasks.common.fewshot import pick_turns
from treegen.tasks.common.sources import (
    Source,
    describe_examples,
    describe_problems,
    make_data_label,
    own_examples,
    problems_of,
)

_PLACE: Final = re.compile(r"<image (\d{1,3})>")


def build_content(problem: Problem, text: str) -> str | list[Message]:
    """Return the content of a problem's node: a text, or messages with images."""
    if problem.messages:
        return [_with_images(message, problem.images) for message in problem.messages]
    if not problem.images:
        return text
    return [{"role": "user", "content": interleave_images(text, problem.images)}]


def interleave_images(text: str, images: Sequence[ImageFile]) -> list[dict[str, Any]]:
    """Return a text with images as the parts of a message.

    Each "<image N>" is replaced by the N-th image, from 1. Images that the text does not name are
    put before the text.
    """
    pieces = _PLACE.split(text)  # alternating texts and numbers
    named = {int(number) for number in pieces[1::2]}
    before = [image.part for number, image in enumerate(images, 1) if number not in named]
    parts: list[dict[str, Any]] = []
    pending = pieces[0]
    for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
        if not 0 < int(number) <= len(images):
            pending += f"<image {number}>{after}"
            continue
        parts += [{"type": "text", "text": pending}, images[int(number) - 1].part]
        pending = after
    parts.append({"type": "text", "text": pending})
    return [*before, *(part for part in parts if part.get("text") != "")]


def _with_images(message: Message, images: Sequence[ImageFile]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [images[part["image"]].part if is_image(part) else part for part in content]
    return {**message, "content": parts}


# Settings of DeepSeek-R1's evaluation (2025): temperature 0.6, top-p 0.95, 32,768 tokens.
REASONING: Final = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=32_768)


def greedy(max_tokens: int, stop: Sequence[str] = (), num_fewshot: int = 0) -> TaskDefaults:
    """Return the defaults of a task with one greedy sample of each problem.

    Args:
        max_tokens: Maximum tokens of a sample.
        stop: Strings that end a sample.
        num_fewshot: Few-shot examples before each problem.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop))
    return TaskDefaults(sampling=sampling, num_samples=1, num_fewshot=num_fewshot)


Loaded = tuple[Sequence[Problem], tuple[Skipped, ...], str]
"""Problems, the rows of the data that cannot be used, and the name of the data."""


class TextTask(Task):
    """A task whose problems are asked below its few-shot examples.

    Subclasses define `name`, `filters`, `defaults` and `score`, and override what differs: `source`
    and `make_problem`, or `read`; `own_examples` and `make_example`, or `load`.
    """

    version = "1"
    source: ClassVar[Source]
    """The places from which rows can come."""
    own_examples: ClassVar[str] = ""
    """The file of the task's own few-shot examples; empty for a task without examples."""
    noun: ClassVar[str] = "problem"
    """The word for a problem in errors."""
    groups: ClassVar[tuple[str, ...]] = ()
    """Fields of the metadata by which accuracy is also reported."""

    def load(self, options: TaskOptions) -> TaskData:
        """Read the problems that the options select, and few-shot examples if the task has some.

        A problem is never one of its own examples.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: Problems or examples cannot be read, or an example is a problem.
        """
        check_arguments(self.name, options.extra, self.arguments)
        if not self.own_examples:
            self.check_no_examples(options)
        data = select_task_data(*self.read(options), options)
        if not self.own_examples:
            return data
        is_drawn = options.fewshot_data is not None
        examples = pick_turns(
            options,
            data.problems,
            self.defaults.num_fewshot,
            lambda row: self.make_example(row, is_drawn=is_drawn),
            self.source.train,
            bundled=self.own_examples,
        )
        turns = [(self.ask_question(question), answer) for question, answer in examples]
        is_own = own_examples(options, len(turns))
        return replace(
            with_examples(data, turns),
            label=make_data_label(options.data, own_examples=is_own),
            notes=(*data.notes, describe_examples(options, len(turns))),
        )

    def read(self, options: TaskOptions) -> Loaded:
        """Return all problems of the data."""
        rows, source = self.source.read(options.data, options.split)
        return *problems_of(rows, source, self.make_problem, noun=self.noun), source

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row; raise ValueError with the reason if it has none."""
        raise NotImplementedError

    def make_example(self, row: dict[str, Any], *, is_drawn: bool) -> Turn:
        """Return the question and the answer of a few-shot example.

        Args:
            row: The row.
            is_drawn: Whether the row is from a split, not from a file of examples.

        Raises:
            ValueError: The row is unusable; the message has the reason.
        """
        raise NotImplementedError

    def check_no_examples(self, options: TaskOptions) -> None:
        """Raise InputError if the options request few-shot examples."""
        if options.num_fewshot or options.fewshot_file or options.fewshot_data:
            raise InputError(
                f"{self.name} does not support few-shot examples; remove {arg('num_fewshot')} "
                "and the other few-shot options"
            )

    def ask(self, problem: Problem) -> str:
        """Return the prompt of a problem, to be placed below the examples."""
        return self.ask_question(problem.question)

    def ask_question(self, question: str) -> str:
        """Return the prompt of a question, up to where its answer begins."""
        return question

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return the tree examples -> problems -> samples, with two levels that samples share.

        Problems with images become chat messages.
        """
        children = [
            Node(build_content(problem, self.ask(problem)), samples=num_samples, id=problem.id)
            for problem in data.problems
        ]
        return with_turns(Node(data.fewshot, children=children), data.turns)

    def overall(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, pass@k, maj@k and the rates of unreadable and cut-off samples."""
        return summarize(
            scores, options, task=self.name, version=self.version, filters=self.filters
        )

    def metric_row(
        self, metric: str, filter: str, options: ReportOptions, **values: Any
    ) -> MetricRow:
        """Return a further row of the report.

        Args:
            metric: Name of the metric.
            filter: Name of the filter.
            options: Options of the report.
            values: The other fields of the row, such as those of `mean_row`.
        """
        head: dict[str, Any] = {"task": self.name, "version": self.version, "filter": filter}
        return MetricRow(**head, num_fewshot=options.num_fewshot, metric=metric, **values)

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the report of `overall` with accuracy by each of the groups."""
        report = self.overall(scores, options)
        for name in self.groups:
            group_of = {problem.id: problem.metadata.get(name) for problem in options.problems}
            title = f"accuracy by {name}"
            report = with_table(
                report, scores, title, name.capitalize(), group_of, options.problems
            )
        return report


def select_task_data(
    problems: Sequence[Problem], skipped: tuple[Skipped, ...], source: str, options: TaskOptions
) -> TaskData:
    """Return the problems that the options select, with a description of their source.

    Args:
        problems: All problems of the source.
        skipped: Rows of the source that cannot be used.
        source: Name of the source.
        options: Options of the run.
    """
    selected = select(problems, options)
    return TaskData(
        problems=selected,
        source=source,
        skipped=skipped,
        label=make_data_label(options.data),
        notes=(describe_problems(options.data, source, len(selected)),),
    )


def with_examples(data: TaskData, turns: Sequence[Turn], gap: str = " ") -> TaskData:
    """Return the data with few-shot examples above the problems.

    Args:
        data: Problems of the run.
        turns: Examples (question, answer).
        gap: Text between a question and its answer.
    """
    prefix = "".join(f"{question}{gap}{answer}\n\n" for question, answer in turns)
    return replace(data, fewshot=prefix, num_fewshot=len(turns), turns=tuple(turns))


def with_table(
    report: Report,
    scores: Sequence[SampleScore],
    title: str,
    column: str,
    group_of: Mapping[str, str | int | None],
    problems: Sequence[Problem] = (),
) -> Report:
    """Return the report with a table of accuracy by group of problems, for the headline filter.

    The table is left out if all problems belong to one group.

    Args:
        report: The report to extend.
        scores: Scores of the samples.
        title: Title of the table.
        column: Heading of the column of groups.
        group_of: Group of each problem id; a problem with the group None or "" belongs to none.
        problems: The problems, whose own `group` clusters the error bars.
    """
    ids: dict[str | int, list[str]] = {}
    for problem_id, group in group_of.items():
        if group is not None and group != "":
            ids.setdefault(group, []).append(problem_id)
    if len(ids) < 2:
        return report
    groups = [
        (str(group), ids[group])
        for group in sorted(ids, key=lambda group: (isinstance(group, str), group))
    ]
    values = problem_values(scores, report.metrics[0].filter)
    clusters = {problem.id: problem.group for problem in problems if problem.group}
    table = table_by(title, column, groups, values, clusters)
    return replace(report, tables=(*report.tables, table))
