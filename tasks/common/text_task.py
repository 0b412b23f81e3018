"""What most tasks are: problems below solved examples, answered by text, and their tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn
from treegen.evals.data_sources import (
    describe_examples,
    describe_problems,
    make_data_label,
    own_examples,
)
from treegen.evals.problem import Problem, Skipped
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions, summarise
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore
from treegen.prompts.tree import Node
from treegen.tasks.common.tree import examples_above_problems

# How DeepSeek-R1 (2025) is evaluated: temperature 0.6, top-p 0.95, 32,768 tokens.
REASONING: Final = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=32_768)

Loaded = tuple[Sequence[Problem], tuple[Skipped, ...], str]
"""Problems, the rows of the data that are none, and what to call the data."""


class TextTask:
    """A task whose problems are asked below its solved examples.

    Subclasses have a `name`, `filters`, `defaults` and `score`, and change what differs. Those
    without solved examples have a method `read`, others a `load` of their own.

    groups: fields of the metadata by which accuracy is told too.
    """

    name: str
    version = "1"
    filters: tuple[str, ...]
    arguments: ClassVar[Mapping[str, str]] = {}
    groups: ClassVar[tuple[str, ...]] = ()

    def load(self, options: TaskOptions) -> TaskData:
        """Read the problems that are asked for.

        Raises:
            InputError: an option cannot be used.
            DataError: the problems cannot be read.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.check_no_examples(options)
        return select_task_data(*self.read(options), options)

    def read(self, options: TaskOptions) -> Loaded:
        """Return all problems of the data."""
        raise NotImplementedError

    def check_no_examples(self, options: TaskOptions) -> None:
        """Raise InputError if solved examples are asked for."""
        if options.num_fewshot or options.fewshot_file or options.fewshot_data:
            raise InputError(
                f"{self.name} has no solved examples; leave out num_fewshot and the like"
            )

    def ask(self, problem: Problem) -> str:
        """Return the prompt of a problem, as it stands below the examples."""
        return problem.question

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return examples -> problems -> samples: two levels that samples share."""
        return examples_above_problems(data, num_samples, self.ask)

    def overall(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, pass@k, maj@k and the rates of unreadable and cut-off samples."""
        return summarise(
            scores, options, task=self.name, version=self.version, filters=self.filters
        )

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return what `overall` does, and accuracy by the groups."""
        report = self.overall(scores, options)
        for name in self.groups:
            group_of = {problem.id: problem.metadata.get(name) for problem in options.problems}
            title = f"accuracy by {name}"
            report = with_table(report, scores, title, name.capitalize(), group_of)
        return report


def select_task_data(
    problems: Sequence[Problem], skipped: tuple[Skipped, ...], source: str, options: TaskOptions
) -> TaskData:
    """Return those problems of a source that the options ask for, with where they come from."""
    found = select(problems, options)
    return TaskData(
        problems=found,
        source=source,
        skipped=skipped,
        label=make_data_label(options.data),
        notes=(describe_problems(options.data, source, len(found)),),
    )


def with_examples(data: TaskData, turns: Sequence[Turn], gap: str = " ") -> TaskData:
    """Return the data with solved examples above its problems. gap: before each answer."""
    shown = "".join(f"{asked}{gap}{answer}\n\n" for asked, answer in turns)
    return replace(data, fewshot=shown, num_fewshot=len(turns), turns=tuple(turns))


def with_own_examples(data: TaskData, turns: Sequence[Turn], options: TaskOptions) -> TaskData:
    """Return the data with examples that may be treegen's own, and where they are from."""
    return replace(
        with_examples(data, turns),
        label=make_data_label(options.data, own_examples=own_examples(options, len(turns))),
        notes=(*data.notes, describe_examples(options, len(turns))),
    )


def with_table(
    report: Report,
    scores: Sequence[SampleScore],
    title: str,
    column: str,
    group_of: Mapping[str, str | int | None],
) -> Report:
    """Return the report with accuracy by group of problems, read by the headline filter.

    There is no table where all problems are of one group.

    Args:
        group_of: By problem id; those of the group None or "" are in none.
    """
    ids: dict[str | int, list[str]] = {}
    for problem_id, group in group_of.items():
        if group is not None and group != "":
            ids.setdefault(group, []).append(problem_id)
    if len(ids) < 2:
        return report
    groups = [(str(group), ids[group]) for group in sorted(ids, key=_sortable)]
    values = problem_values(scores, report.metrics[0].filter)
    return replace(report, tables=(*report.tables, table_by(title, column, groups, values)))


def _sortable(value: str | int) -> tuple[bool, str | int]:
    return isinstance(value, str), value
