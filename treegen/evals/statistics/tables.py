"""Tables and grids for results that only some tasks have; any command can show them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from treegen.evals.statistics.estimators import estimate, find_clusters, mean_by
from treegen.evals.verdict import SampleScore

Cell = str | int | float | None

GROUP_COLUMNS: Final = ("Problems", "Accuracy", "Stderr", "Low", "High")


@dataclass(frozen=True, slots=True)
class Table:
    """Lines under a title; floats are values from 0 to 1, and None is an undefined value."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class AnnotatedTable(Table):
    """A table with sentences below it."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Values from 0 to 1 over two axes, for a heat map."""

    title: str
    row_name: str
    row_labels: tuple[str, ...]
    column_name: str
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """One row for each of row_labels, from the top; None where nothing was measured."""


def problem_values(scores: Iterable[SampleScore], filter: str) -> dict[str, float]:
    """Return for every problem the mean credit of its samples under one filter."""
    return mean_by(
        (sample.problem_id, verdict.correct if verdict.credit is None else verdict.credit)
        for sample in scores
        if (verdict := sample.verdicts.get(filter)) is not None
    )


def table_by(
    title: str,
    name: str,
    groups: Sequence[tuple[str, Collection[str]]],
    values: Mapping[str, float],
    clusters: Mapping[str, str] | None = None,
) -> Table:
    """Return the mean value of each group of problems, with error bars over its problems.

    Args:
        title: Title of the table.
        name: Title of the column of labels.
        groups: (label, problem ids) pairs. A problem without a value has no samples and is left
            out.
        values: The value of each problem, by id.
        clusters: The clusters of problems that are not independent, by problem id.
    """
    rows: list[tuple[Cell, ...]] = []
    for label, ids in groups:
        valued = [problem_id for problem_id in ids if problem_id in values]
        if valued:
            names = find_clusters(clusters or {}, valued)
            mean = estimate([values[problem_id] for problem_id in valued], names)
            rows.append((label, len(valued), mean.value, mean.stderr, mean.low, mean.high))
        else:
            rows.append((label, 0, None, None, None, None))
    return Table(title, (name, *GROUP_COLUMNS), tuple(rows))


def by_decile(depth_of: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    """Group problem ids by the tenth of a document in which they are.

    Args:
        depth_of: The relative depth of each problem in its document, from 0 to 1, by problem id.

    Returns:
        (label, problem ids) pairs, from "0-10%" to "90-100%".
    """
    tenths: list[list[str]] = [[] for _ in range(10)]
    for problem_id, depth in depth_of.items():
        tenths[min(9, int(depth * 10))].append(problem_id)
    return [(f"{10 * i}-{10 * (i + 1)}%", ids) for i, ids in enumerate(tenths)]
