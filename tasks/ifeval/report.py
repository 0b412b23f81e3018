"""IFEval's four accuracies, and a table by kind of instruction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions
from treegen.evals.statistics.tables import table_by
from treegen.evals.verdict import SampleScore, Verdict

_Z95: Final = 1.959963984540054


@dataclass(frozen=True, slots=True)
class FollowedVerdict(Verdict):
    """A verdict on an answer to a prompt with several instructions.

    correct: whether all are followed.
    credit: the share that is followed.
    followed: which are.
    """

    followed: tuple[bool, ...] = ()


def by_instruction(
    overall: Report, scores: Sequence[SampleScore], options: ReportOptions
) -> Report:
    """Return the report with the accuracy over instructions, and a table by their kind."""
    rows: list[MetricRow] = []
    for row in overall.metrics:
        if row.metric != "exact_match":
            rows.append(row)
            continue
        rows.append(replace(row, metric="prompt_level_acc"))
        fields = _over_instructions(_shares(scores, row.filter))
        rows.append(replace(row, metric="inst_level_acc", **fields))
    kinds: dict[str, list[str]] = {}
    for problem in options.problems:
        for index, kind in enumerate(problem.metadata.get("instructions", ())):
            kinds.setdefault(kind, []).append(f"{problem.id}/{index}")
    first = overall.metrics[0].filter
    values = {
        f"{id}/{index}": value
        for id, shares in _shares(scores, first).items()
        for index, value in enumerate(shares)
    }
    table = table_by(
        f"{first} accuracy by instruction", "Instruction", sorted(kinds.items()), values
    )
    tables = (*overall.tables, table) if kinds else overall.tables
    return replace(overall, metrics=tuple(rows), majority=(), tables=tables)


def _shares(scores: Sequence[SampleScore], filter: str) -> dict[str, list[float]]:
    """Return for each problem how often each of its instructions is followed."""
    found: dict[str, list[tuple[bool, ...]]] = {}
    for sample in scores:
        verdict = sample.verdicts[filter]
        assert isinstance(verdict, FollowedVerdict)
        found.setdefault(sample.problem_id, []).append(verdict.followed)
    return {
        id: [sum(column) / len(flags) for column in zip(*flags, strict=True)]
        for id, flags in found.items()
    }


def _over_instructions(shares: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the mean over instructions. Its error is that of a ratio over problems.

    A problem has several instructions, whose outcomes go together. So problems are what varies.
    """
    counts = [len(each) for each in shares.values()]
    if not counts:
        return {"value": None, "stderr": None, "low": None, "high": None, "reason": "no samples"}
    sums = [math.fsum(each) for each in shares.values()]
    num, value = len(counts), math.fsum(sums) / sum(counts)
    if num < 2:
        return {"value": value, "stderr": None, "low": None, "high": None}
    squares = math.fsum((s - value * n) ** 2 for s, n in zip(sums, counts, strict=True))
    stderr = math.sqrt(squares * num / (num - 1)) / sum(counts)
    low, high = max(0.0, value - _Z95 * stderr), min(1.0, value + _Z95 * stderr)
    return {"value": value, "stderr": stderr, "low": low, "high": high}
