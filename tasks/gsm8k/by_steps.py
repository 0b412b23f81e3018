"""GSM8K's accuracy by how many steps the reference solution takes."""

from collections.abc import Sequence
from dataclasses import replace

from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.verdict import SampleScore
from treegen.tasks.gsm8k.data import reasoning_and_number


def by_steps(report: Report, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
    """Return the report with a table of accuracy by steps, read by the headline filter.

    There is no table if all problems have equally many steps.
    """
    ids: dict[int, list[str]] = {}
    for problem in options.problems:
        ids.setdefault(_num_steps(problem), []).append(problem.id)
    if len(ids) < 2:
        return report
    groups = [(str(num), ids[num]) for num in sorted(ids)]
    values = problem_values(scores, report.metrics[0].filter)
    table = table_by("accuracy by steps of the reference solution", "Steps", groups, values)
    return replace(report, tables=(*report.tables, table))


def _num_steps(problem: Problem) -> int:
    """Lines of the reference solution before its answer, each of which is a step."""
    reasoning, _ = reasoning_and_number(problem.metadata.get("solution", ""))
    return sum(bool(line.strip()) for line in reasoning.splitlines())
