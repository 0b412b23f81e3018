"""Finds scores of a run that differ from those in its results.json or its certificate."""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treegen.errors import Message
from treegen.report.tables import metric_label

_CLOSE: Final = 1e-9
"""Absolute and relative tolerance of equal scores; library versions round differently."""
_MAX: Final = sys.float_info.max
_WHY: Final = "the samples, the data or the code have changed since the run was scored"


class ChangedNotice(Message):
    """The notice that results.json has other scores than the samples."""


def list_changed_scores(stored: object, now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name and both values of each score that differs, the headline first.

    Scores that only one of the reports has are left out: `treegen score` adds and removes metrics.

    Args:
        stored: An earlier report, as in results.json, which may have any content.
        now: The report of the same run as treegen computes it now.
    """
    before = dict(_read_scores(stored))
    return [
        (name, *_format_both(before[name], value))
        for name, value in _read_scores(now)
        if name in before and not _is_equal(before[name], value)
    ]


def describe_changed_scores(stored: object, now: Mapping[str, Any]) -> str:
    """Return a sentence that names the first score that differs; empty if none does.

    Args:
        stored: The report in results.json, which may have any content.
        now: The report as treegen computes it now.
    """
    changed = list_changed_scores(stored, now)
    if not changed:
        return ""
    name, before, after = changed[0]
    more = f" ({len(changed) - 1:,} more scores differ)" if len(changed) > 1 else ""
    return describe_change(f"{name} {before}", f"the samples now give {after}{more}")


def describe_change(stored: str, now: str) -> str:
    """Return the sentence that results.json has one value, and the run another."""
    return f"results.json has {stored}, but {now}; {_WHY}"


def _read_scores(report: object) -> Iterator[tuple[str, float | None]]:
    """Yield the name and value of each metric and vote of a report, the headline first."""
    parts = report if isinstance(report, Mapping) else {}
    metrics, votes = (
        [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []
        for rows in (parts.get("metrics"), parts.get("majority"))
    )
    tasks = dict.fromkeys(str(row.get("task")) for row in metrics)
    filters = dict.fromkeys(str(row.get("filter")) for row in metrics)
    for row in (*metrics, *votes):
        value, filter = row.get("value"), str(row.get("filter"))
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            value = max(-_MAX, min(value, _MAX))  # JSON integers may be larger than any float
        name = f"maj@{row.get('k')}" if "k" in row else metric_label(str(row.get("metric")))
        if filter != next(iter(filters), filter):
            name += f" ({filter})"
        if len(tasks) > 1 and "task" in row:
            name = f"{row['task']}: {name}"
        yield name, value


def _is_equal(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _format_both(*values: float | None) -> tuple[str, str]:
    """Return both values with three decimal places, or more if they are equal in three."""
    for digits in (3, 6, 12):
        first, second = ("n/a" if value is None else f"{value:.{digits}f}" for value in values)
        if first != second:
            break
    return first, second
