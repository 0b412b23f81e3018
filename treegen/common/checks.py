"""Checks of single values that a user gives. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from treegen.errors import InputError


def check_number(name: str, value: object) -> None:
    """Raise InputError for what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise InputError(f"{name} must be a finite number, got {value!r}")


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Raise InputError for what is not a whole number, or out of its bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {value!r}")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise InputError(f"{name} must be at most {most:,}, got {value}")


def check_bool(name: str, value: object) -> None:
    """Raise InputError for what is neither True nor False, such as the word "false"."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")


def device_name(value: object) -> str:
    """Return the text that names a device.

    Args:
        value: Text, or a `torch.device`. Builds of torch read a bare number differently.

    Raises:
        InputError: It is neither.
    """
    if isinstance(value, str):
        return value
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(value)
    raise InputError(f"device must be auto, cpu, cuda or cuda:N, got {value!r:.60}")


def is_finite(value: float) -> bool:
    """Return whether a number is finite as a float, which a whole number may be too large for."""
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """Return what a list has, and nothing for None; raise InputError for what is no list."""
    if values is None:
        return ()
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InputError(f"{name} must be a list, got {values!r}")
    return tuple(values)
