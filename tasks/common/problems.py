"""From rows of data to problems: what ids are, and which rows fail."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.problem import Problem, Skipped
from treegen.tasks.common.jsonl import text_field

TASK_PAGE: Final = "; see the fields that the task reads (docs/tasks.md)"


def row_id(row: dict[str, Any], line: int, task: str) -> str:
    """Return the id that a row has, or one of its task's name and its line.

    Lines count from 0 here, like the rows of the hub's tables, so that ids agree.

    Raises:
        ValueError: the id is neither text nor a whole number.
    """
    given = row.get("id")
    if given is None:
        return f"{task}-{line - 1}"
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError("id must be text or a whole number")
    return text_field({"id": str(given)}, "id")


RowsToRead = tuple[
    Iterable[tuple[int, dict[str, Any]]], str, Callable[[dict[str, Any], int], Problem]
]
"""Numbered rows, what to call them, and what makes a problem of one; see `problems_of`."""


def problems_of_all(
    tables: Iterable[RowsToRead],
) -> tuple[list[Problem], tuple[Skipped, ...], str]:
    """Return the problems of several tables, their rows that are none, and their names."""
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    sources = []
    for rows, source, make in tables:
        found, bad = problems_of(rows, source, make)
        problems += found
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
    """Return the problems of numbered rows, and the rows that are none.

    Args:
        make: A problem of a row and its line; ValueError, with the reason, where there is none.
        noun: What a problem is called in errors.

    Raises:
        DataError: two problems have one id, or there is none.
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
