"""IFEval's four accuracies, and a table by kind of instruction."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions, clusters_of, mean_row
from treegen.evals.statistics.tables import table_by
from treegen.evals.verdict import SampleScore, Verdict


@dataclass(frozen=True, slots=True)
class FollowedVerdict(Verdict):
    """A verdict on an answer to a prompt with several instructions.

    correct: whether all instructions are followed.
    credit: the share of followed instructions.
    followed: whether each instruction is followed.
    """

    followed: tuple[bool, ...] = ()


def by_instruction(
    overall: Report, scores: Sequence[SampleScore], options: ReportOptions
) -> Report:
    """Return the report with the accuracy over instructions, and a table by their kind.

    Args:
        overall: The report to extend.
        scores: Scores of the samples.
        options: Options of the report.
    """
    rows: list[MetricRow] = []
    ids = list(options.problem_ids)
    clusters = dict(zip(ids, clusters_of(options.problems, ids) or (), strict=False))
    for row in overall.metrics:
        if row.metric != "exact_match":
            rows.append(row)
            continue
        rows.append(replace(row, metric="prompt_level_acc"))
        fields = _over_instructions(_shares(scores, row.filter), clusters)
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
    """Return, for each problem, the share of samples that follow each of its instructions."""
    found: dict[str, list[tuple[bool, ...]]] = {}
    for sample in scores:
        verdict = sample.verdicts[filter]
        assert isinstance(verdict, FollowedVerdict)
        found.setdefault(sample.problem_id, []).append(verdict.followed)
    return {
        id: [sum(column) / len(flags) for column in zip(*flags, strict=True)]
        for id, flags in found.items()
    }


def _over_instructions(
    shares: Mapping[str, Sequence[float]], clusters: Mapping[str, Hashable]
) -> dict[str, Any]:
    """Return the mean over instructions.

    The outcomes of one prompt's instructions are correlated. So the error bar is clustered by
    prompts, or by the groups of prompts.
    """
    values = [value for each in shares.values() for value in each]
    names = [clusters.get(id, ("", id)) for id, each in shares.items() for _ in each]
    return {"stderr": None, "low": None, "high": None, **mean_row(values, clusters=names)}
