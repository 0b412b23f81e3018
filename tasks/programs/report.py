"""Metrics of programs that ran on tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from treegen.evals.statistics.metrics import (
    MetricRow,
    Report,
    ReportOptions,
    default_pass_ks,
    mean_row,
    summarise,
)
from treegen.evals.statistics.tables import Table, problem_values, table_by
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.sandbox import ProgramStatus

NO_PROGRAM: Final = "no_program"

# How a program can fail. Judge errors are left out, because they are not a score.
_RATES: Final = (
    ProgramStatus.WRONG_ANSWER,
    ProgramStatus.RUNTIME_ERROR,
    ProgramStatus.COMPILE_ERROR,
    ProgramStatus.TIMEOUT,
    ProgramStatus.MEMORY_LIMIT,
    ProgramStatus.OUTPUT_LIMIT,
    NO_PROGRAM,
)


@dataclass(frozen=True, slots=True)
class ProgramVerdict(Verdict):
    """A verdict on a program.

    answer: a short hash of the program. credit: the share of its tests that passed.
    """

    outcome: str = ""
    """Accepted, or its first kind of failure."""


def report_programs(
    scores: Sequence[SampleScore],
    options: ReportOptions,
    *,
    task: str,
    version: str,
    filters: Sequence[str],
    difficulties: Sequence[str],
    headline: str,
    by_test: bool,
) -> Report:
    """Return accuracy, pass@k, test-case average, failure rates and a table by difficulty.

    Accuracy is the share of samples that pass all tests, which is pass@1. Failure rates and tables
    use the first filter.

    Args:
        scores: Scores of the samples.
        options: Options of the report.
        task: Name of the task.
        version: Version of the task.
        filters: Names of the task's filters.
        difficulties: Difficulties in the order of the table's rows.
        headline: Name of the accuracy metric.
        by_test: Whether each program ran on all tests, so that the share of passed tests is known.
    """
    pass_ks = options.pass_ks
    if pass_ks is None:
        pass_ks = tuple(sorted({1, *default_pass_ks(options.num_samples)}))
    if headline == "pass@1":
        pass_ks = tuple(k for k in pass_ks if k != 1)
    summary_options = replace(options, pass_ks=pass_ks, maj_ks=options.maj_ks or ())
    overall = summarise(scores, summary_options, task=task, version=version, filters=tuple(filters))
    rows = [
        replace(row, metric=headline) if row.metric == "exact_match" else row
        for row in overall.metrics
        if row.metric != "invalid"
    ]
    cut = next(i for i, row in enumerate(rows) if row.metric == "truncated")
    rows[cut:cut] = _outcome_rows(scores, rows[0], by_test=by_test)
    tables = _difficulty_tables(
        scores, _by_difficulty(options, difficulties), filters[0], headline, by_test=by_test
    )
    return replace(overall, metrics=tuple(rows), tables=(*overall.tables, *tables))


def _outcome_rows(
    scores: Sequence[SampleScore], like: MetricRow, *, by_test: bool
) -> list[MetricRow]:
    """Return the test-case average and the rates of outcomes, as means over problems.

    Args:
        scores: Scores of the samples.
        like: A row of the report, which names the task, the filter and the shots.
        by_test: Whether the share of passed tests is known.
    """
    grouped: dict[str, list[ProgramVerdict]] = {}
    for sample in scores:
        verdict = sample.verdicts[like.filter]
        assert isinstance(verdict, ProgramVerdict)
        grouped.setdefault(sample.problem_id, []).append(verdict)

    def _row(metric: str, values: list[float], *, higher_is_better: bool = False) -> MetricRow:
        empty: dict[str, Any] = {"stderr": None, "low": None, "high": None, "reason": None}
        fields = {**empty, **mean_row(values), "higher_is_better": higher_is_better}
        return replace(like, metric=metric, **fields)

    # fsum does not depend on the order of the samples.
    passed = [math.fsum(v.credit or 0.0 for v in group) / len(group) for group in grouped.values()]
    rows = [_row("test_case_average", passed, higher_is_better=True)] if by_test else []
    for outcome in _RATES:
        shares = [
            sum(verdict.outcome == outcome for verdict in group) / len(group)
            for group in grouped.values()
        ]
        rows.append(_row(str(outcome), shares))
    return rows


def _difficulty_tables(
    scores: Sequence[SampleScore],
    groups: Sequence[tuple[str, list[str]]],
    filter: str,
    headline: str,
    *,
    by_test: bool,
) -> list[Table]:
    """Return tables of the headline, and of passed tests, by difficulty; none without groups.

    Args:
        scores: Scores of the samples.
        groups: Problem ids of each difficulty.
        filter: Name of the filter.
        headline: Name of the accuracy metric.
        by_test: Whether the share of passed tests is known.
    """
    if not groups:
        return []
    flags = [
        replace(s, verdicts={filter: Verdict("", correct=s.verdicts[filter].correct)})
        for s in scores
    ]
    name = headline.replace("_", " ")
    values = problem_values(flags, filter)
    tables = [table_by(f"{name} by difficulty", "Difficulty", groups, values)]
    if by_test:
        values = problem_values(scores, filter)
        tables.append(table_by("test-case average by difficulty", "Difficulty", groups, values))
    return tables


def _by_difficulty(
    options: ReportOptions, difficulties: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return the problem ids of each difficulty in the data."""
    ids_of: dict[str, list[str]] = {}
    for problem in options.problems:
        if "difficulty" in problem.metadata:
            ids_of.setdefault(problem.metadata["difficulty"], []).append(problem.id)
    order = [name for name in difficulties if name in ids_of]
    return [(name, ids_of[name]) for name in (*order, *sorted(ids_of.keys() - set(order)))]
