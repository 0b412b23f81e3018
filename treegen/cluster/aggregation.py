"""Aggregates usage, status and levels of several workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Final

from treegen.common.outputs import LevelRows, Status, Usage

_APART: Final = ("seconds", "page_size", "impl", "kernels")


def sum_usages(usages: Sequence[Usage], total: Usage) -> None:
    """Write the sums of workers' usages into `total`; times are averaged."""
    for each in fields(Usage):
        values = [getattr(usage, each.name) for usage in usages]
        if each.name not in _APART and values and isinstance(values[0], int | float):
            count = len(values) if each.name.endswith("_seconds") else 1
            setattr(total, each.name, sum(values) / count if count > 1 else sum(values))
    total.page_size = max((usage.page_size for usage in usages), default=0)
    for name in ("impl", "eager_because", "uncompiled_because"):
        setattr(total, name, next((v for u in usages if (v := getattr(u, name))), ""))
    kernels: dict[str, dict[str, int]] = {}
    for usage in usages:
        for level, steps in usage.kernels.items():
            mine = kernels.setdefault(level, {})
            for kernel, count in steps.items():
                mine[kernel] = mine.get(kernel, 0) + count
    total.kernels = kernels


def all_statuses(each: Iterable[Status]) -> Status:
    """Return the active rows and used pages of all workers together."""
    found = list(each)
    return Status(
        sum(status.rows for status in found),
        sum(status.pages for status in found),
        sum(status.num_pages for status in found),
    )


def all_levels(each: Iterable[Sequence[LevelRows]]) -> tuple[LevelRows, ...]:
    """Return the levels that rows read; a segment counts once for each worker that has it."""
    found: dict[int, LevelRows] = {}
    for levels in each:
        for level in levels:
            had = found.get(level.depth, LevelRows(level.depth, 0, 0, 0))
            found[level.depth] = LevelRows(
                level.depth,
                had.segments + level.segments,
                had.rows + level.rows,
                had.kept + level.kept,
            )
    return tuple(found[depth] for depth in sorted(found))
