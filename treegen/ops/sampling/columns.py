"""Columns: tensors with one number per row, in the dataclasses of sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from treegen.common.device import to_device

# Legend: P rows

_T = TypeVar("_T")


def column(values: Sequence[float], neutral: float, index_P: Tensor) -> Tensor | None:
    """Return one number per row, float32 [P]; None if all are neutral.

    Args:
        values: The number of each set of parameters.
        neutral: The number that has no effect.
        index_P: The set of each row, int64 [P].
    """
    if all(value == neutral for value in values):
        return None
    return to_device(np.array(values, dtype=np.float32), index_P.device)[index_P]


def slice_rows(params: _T, rows: slice) -> _T:
    """Return a dataclass with some of its rows.

    Each tensor whose name says [P, ...] is sliced, in nested dataclasses too.
    """
    instance: Any = params
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(instance)):
        value = getattr(instance, name)
        if isinstance(value, Tensor) and name.rpartition("_")[2].startswith("P"):
            changes[name] = value[rows]
        elif is_dataclass(value):
            changes[name] = slice_rows(value, rows)
        elif isinstance(value, list) and all(map(is_dataclass, value)):
            changes[name] = [slice_rows(item, rows) for item in value]
    part: _T = replace(instance, **changes)
    return part
