"""Paths that callers give."""

import os
from pathlib import Path

from treegen.errors import InputError


def given_path(name: str, given: object) -> Path:
    """Return what is given as a path; raises InputError if no file can have the name."""
    try:
        os.fsencode(path := Path(given))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a path, got {given!r:.60}") from None
    if "\0" in str(path):
        raise InputError(f"{name} must be a path, got {given!r:.60}")
    return path
