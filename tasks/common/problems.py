"""Makes problems from rows of data: assigns ids and reports rows that cannot be used."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.problem import Problem, Skipped
from treegen.tasks.common.files import text_field

TASK_PAGE: Final = "; see the fields that the task reads (docs/tasks.md)"


def row_id(row: dict[str, Any], line: int, task: str) -> str:
    """Return the id of a row; by default its task's name and its line.

    Default ids count lines from 0, like the rows of the hub's tables, so that ids agree.

    Args:
        row: The row; its field "id" is used if present.
        line: Line number of the row, from 1.
        task: Name of the task.

    Raises:
        ValueError: The id is neither text nor a whole number.
    """
    value = row.get("id")
    if value is None:
        return f"{task}-{line - 1}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("id must be text or a whole number")
    return text_field({"id": str(value)}, "id")


RowsToRead = tuple[
    Iterable[tuple[int, dict[str, Any]]], str, Callable[[dict[str, Any], int], Problem]
]
"""Numbered rows, their name for messages, and the function that makes a problem from a row."""


def problems_of_all(
    tables: Iterable[RowsToRead],
) -> tuple[list[Problem], tuple[Skipped, ...], str]:
    """Return the problems of several tables, the unusable rows, and the tables' names."""
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    sources = []
    for rows, source, make in tables:
        read, bad = problems_of(rows, source, make)
        problems += read
        skipped += bad
        sources.append(source)
    return problems, tuple(skipped), " and ".join(sources)


def problems_of(
    rows: Iterable[tuple[int, dict[str, Any]]],
    source: str,
    make: Callable[[dict[str, Any], int], Problem],
    *,
    noun: str = "problem",
) -> tuple[tuple[Problem, ...], tuple[Skipped, ...]]:
    """Return the problems of numbered rows, and the rows that cannot be used.

    Args:
        rows: Rows with their line numbers, from 1.
        source: Name of the data, for messages.
        make: Makes a problem from a row and its line; raises ValueError with the reason if it
            cannot.
        noun: Word for a problem in errors.

    Raises:
        DataError: Two problems have the same id, or there is no problem.
    """
    problems: dict[str, Problem] = {}
    line_of: dict[str, int] = {}
    skipped: list[Skipped] = []
    for line, row in rows:
        try:
            problem = make(row, line)
        except ValueError as error:
            skipped.append(Skipped(source, line, str(error)))
            continue
        if first := line_of.get(problem.id):
            raise DataError(
                f"{source}, lines {first} and {line} have the same id {problem.id!r}; "
                "change or remove one of them"
            )
        problems[problem.id], line_of[problem.id] = problem, line
    if not problems:
        reason = f"; {skipped[0]}" if skipped else ""
        raise DataError(f"{source} has no usable {noun}{reason}{TASK_PAGE}")
    return tuple(problems.values()), tuple(skipped)
