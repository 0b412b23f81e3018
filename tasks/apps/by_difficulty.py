"""Metrics over judged programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from treegen.evals.metrics import (
    MetricRow,
    Report,
    ReportOptions,
    default_pass_ks,
    mean_row,
    summarise,
)
from treegen.evals.tables import Table, problem_values, table_by
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.apps.data import DIFFICULTIES
from treegen.tasks.judge import JudgeVerdict

NO_PROGRAM: Final = "no_program"

# How a program can fail. Judge errors are not among them, because they are no score.
_RATES: Final = (
    JudgeVerdict.WRONG_ANSWER,
    JudgeVerdict.RUNTIME_ERROR,
    JudgeVerdict.COMPILE_ERROR,
    JudgeVerdict.TIMEOUT,
    JudgeVerdict.MEMORY_LIMIT,
    JudgeVerdict.OUTPUT_LIMIT,
    NO_PROGRAM,
)


@dataclass(frozen=True, slots=True)
class ProgramVerdict(Verdict):
    """A verdict on a program.

    answer: a short hash of the program.
    credit: the share of its tests that passed.
    outcome: accepted, or how it failed first.
    """

    outcome: str = ""


def report_programs(
    scores: Sequence[SampleScore], options: ReportOptions, *, task: str, version: str, filter: str
) -> Report:
    """Return strict accuracy, pass@k, test-case average, failure rates and a table by difficulty.

    Strict accuracy is the share of samples that pass all tests, which is pass@1.
    """
    pass_ks = options.pass_ks
    if pass_ks is None:
        pass_ks = tuple(sorted({1, *default_pass_ks(options.num_samples)}))
    asked = replace(options, pass_ks=pass_ks, maj_ks=options.maj_ks or ())
    overall = summarise(scores, asked, task=task, version=version, filters=(filter,))
    rows = [_renamed(row) for row in overall.metrics if row.metric != "invalid"]
    cut = next(i for i, row in enumerate(rows) if row.metric == "truncated")
    grouped: dict[str, list[ProgramVerdict]] = {}
    for sample in scores:
        verdict = sample.verdicts[filter]
        assert isinstance(verdict, ProgramVerdict)
        grouped.setdefault(sample.problem_id, []).append(verdict)

    def row(metric: str, values: list[float], *, higher_is_better: bool = False) -> MetricRow:
        return MetricRow(
            task=task,
            version=version,
            filter=filter,
            num_fewshot=options.num_fewshot,
            metric=metric,
            higher_is_better=higher_is_better,
            **mean_row(values),
        )

    passed = [sum(v.credit or 0.0 for v in group) / len(group) for group in grouped.values()]
    rows[cut:cut] = [
        row("test_case_average", passed, higher_is_better=True),
        *(
            row(str(outcome), [_share(group, outcome) for group in grouped.values()])
            for outcome in _RATES
        ),
    ]
    return replace(
        overall,
        metrics=tuple(rows),
        tables=(*overall.tables, *_by_difficulty(scores, options, filter)),
    )


def _renamed(row: MetricRow) -> MetricRow:
    return replace(row, metric="strict_accuracy") if row.metric == "exact_match" else row


def _share(group: Sequence[ProgramVerdict], outcome: str) -> float:
    return sum(verdict.outcome == outcome for verdict in group) / len(group)


def _by_difficulty(
    scores: Sequence[SampleScore], options: ReportOptions, filter: str
) -> tuple[Table, ...]:
    ids_of: dict[str, list[str]] = {}
    for problem in options.problems:
        ids_of.setdefault(problem.metadata["difficulty"], []).append(problem.id)
    if not ids_of:
        return ()
    order = [name for name in DIFFICULTIES if name in ids_of]
    groups = [(name, ids_of[name]) for name in (*order, *sorted(ids_of.keys() - set(order)))]
    shares = problem_values(scores, filter)
    flags = [
        replace(
            s, verdicts={filter: Verdict(s.verdicts[filter].answer, s.verdicts[filter].correct)}
        )
        for s in scores
    ]
    return (
        table_by(
            "strict accuracy by difficulty", "Difficulty", groups, problem_values(flags, filter)
        ),
        table_by("test-case average by difficulty", "Difficulty", groups, shares),
    )
