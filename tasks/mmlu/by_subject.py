"""MMLU's averages: over questions, over subjects, by category and by subject."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from treegen.evals.statistics.estimators import mean_of_means
from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.verdict import SampleScore
from treegen.tasks.common.sources import bundled_rows

CATEGORY_OF: Final = {
    subject: row["category"]
    for _, row in bundled_rows("mmlu_categories.jsonl")
    for subject in row["subjects"]
}


def subject_of(problem_id: str) -> str:
    """Return the subject in an id such as "anatomy-17"."""
    return problem_id.rpartition("-")[0]


def by_subject(overall: Report, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
    """Return the report with means over subjects, and tables by category and subject.

    The mean over subjects follows each mean over questions. The tables have the mean of each
    category and of each subject, for the first filter.

    Args:
        overall: The report to extend.
        scores: Scores of the samples.
        options: Options of the report.
    """
    rows: list[MetricRow] = []
    for row in overall.metrics:
        rows.append(row)
        if row.metric in ("exact_match", "acc") and row.value is not None:
            rows.append(_macro(row, problem_values(scores, row.filter)))
    values = problem_values(scores, overall.metrics[0].filter)
    subjects = _groups(options.problem_ids, subject_of)
    categories = _groups(options.problem_ids, lambda name: CATEGORY_OF.get(subject_of(name), ""))
    categories.pop("", None)
    tables = [table_by("accuracy by subject", "Subject", list(subjects.items()), values)]
    if categories:
        table = table_by("accuracy by category", "Category", list(categories.items()), values)
        tables.insert(0, table)
    return replace(overall, metrics=tuple(rows), tables=tuple(tables))


def _groups(problem_ids: Iterable[str], group_of: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for problem_id in problem_ids:
        groups.setdefault(group_of(problem_id), []).append(problem_id)
    return dict(sorted(groups.items()))


def _macro(row: MetricRow, values: Mapping[str, float]) -> MetricRow:
    """Return the mean over subjects; its error bars are for other questions on these subjects."""
    groups = _groups(values, subject_of).values()
    mean = mean_of_means([[values[problem_id] for problem_id in ids] for ids in groups])
    fields = {name: getattr(mean, name) for name in ("value", "stderr", "low", "high")}
    return replace(row, metric=f"{row.metric}_macro", **fields)
