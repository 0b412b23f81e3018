"""Metrics of programs that ran on tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from treegen.evals.statistics.metrics import (
    MetricRow,
    Report,
    ReportOptions,
    clusters_of,
    default_pass_ks,
    mean_row,
)
from treegen.evals.statistics.tables import Table, problem_values, table_by
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.sandbox import ProgramStatus

NO_PROGRAM: Final = "no_program"

# How a program can fail. Judge errors are left out, because they are not a score.
_NO_FAILURES: Final = (ProgramStatus.ACCEPTED, ProgramStatus.JUDGE_ERROR)
_RATES: Final = (*(status for status in ProgramStatus if status not in _NO_FAILURES), NO_PROGRAM)


@dataclass(frozen=True, slots=True)
class ProgramVerdict(Verdict):
    """A verdict on a program.

    answer: a short hash of the program. credit: the share of its tests that passed.
    """

    outcome: str = ""
    """Accepted, or its first kind of failure."""


class ReportedTask(TextTask):
    """A task whose samples are programs: its metrics."""

    all_tests: ClassVar[bool] = False
    """Whether the tests after the first failure run as well."""
    headline: ClassVar[str] = "pass@1"
    """The name of the accuracy metric."""
    difficulties: ClassVar[tuple[str, ...]] = ("easy", "medium", "hard")
    """The difficulties that the data may have, in the order of the report."""

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, pass@k, failure rates and a table by difficulty.

        Accuracy is the share of samples that pass all tests, which is pass@1. With `all_tests`, the
        test-case average is reported too. Failure rates and tables use the first filter.
        """
        pass_ks = options.pass_ks
        if pass_ks is None:
            pass_ks = tuple(sorted({1, *default_pass_ks(options.num_samples)}))
        if self.headline == "pass@1":
            pass_ks = tuple(k for k in pass_ks if k != 1)
        summary_options = replace(options, pass_ks=pass_ks, maj_ks=options.maj_ks or ())
        overall = self.overall(scores, summary_options)
        rows = [
            replace(row, metric=self.headline) if row.metric == "exact_match" else row
            for row in overall.metrics
            if row.metric != "invalid"
        ]
        cut = next(i for i, row in enumerate(rows) if row.metric == "truncated")
        rows[cut:cut] = _outcome_rows(scores, rows[0], options, by_test=self.all_tests)
        tables = _difficulty_tables(self, scores, options)
        return replace(overall, metrics=tuple(rows), tables=(*overall.tables, *tables))


def _outcome_rows(
    scores: Sequence[SampleScore], like: MetricRow, options: ReportOptions, *, by_test: bool
) -> list[MetricRow]:
    """Return the test-case average and the rates of outcomes, as means over problems.

    Args:
        scores: Scores of the samples.
        like: A row of the report, which names the task, the filter and the shots.
        options: Options of the report.
        by_test: Whether the share of passed tests is known.
    """
    grouped: dict[str, list[ProgramVerdict]] = {}
    for sample in scores:
        verdict = sample.verdicts[like.filter]
        assert isinstance(verdict, ProgramVerdict)
        grouped.setdefault(sample.problem_id, []).append(verdict)
    clusters = clusters_of(options.problems, list(grouped))

    def _row(metric: str, values: list[float], *, higher_is_better: bool = False) -> MetricRow:
        empty: dict[str, Any] = {"stderr": None, "low": None, "high": None, "reason": None}
        fields = {**empty, **mean_row(values, None, clusters), "higher_is_better": higher_is_better}
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
    task: ReportedTask, scores: Sequence[SampleScore], options: ReportOptions
) -> list[Table]:
    """Return tables of the headline, and of passed tests, by difficulty; none without difficulties.

    Args:
        task: The task.
        scores: Scores of the samples.
        options: Options of the report.
    """
    ids_of: dict[str, list[str]] = {}
    for problem in options.problems:
        if "difficulty" in problem.metadata:
            ids_of.setdefault(problem.metadata["difficulty"], []).append(problem.id)
    if not ids_of:
        return []
    known = [name for name in task.difficulties if name in ids_of]
    groups = [(name, ids_of[name]) for name in (*known, *sorted(ids_of.keys() - set(known)))]
    filter = task.filters[0]
    flags = [
        replace(s, verdicts={filter: Verdict("", correct=s.verdicts[filter].correct)})
        for s in scores
    ]
    name = task.headline.replace("_", " ")
    values = problem_values(flags, filter)
    clusters = {problem.id: problem.group for problem in options.problems if problem.group}
    tables = [table_by(f"{name} by difficulty", "Difficulty", groups, values, clusters)]
    if task.all_tests:
        values = problem_values(scores, filter)
        title = "test-case average by difficulty"
        tables.append(table_by(title, "Difficulty", groups, values, clusters))
    return tables
