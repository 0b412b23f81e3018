"""Paths that callers give, and names that become parts of paths."""

import os
import re
from pathlib import Path
from typing import Final

from treegen.errors import InputError, arg

_MOST_BYTES: Final = 200
"""Maximum bytes of a name; file systems allow 255, and scratch files append a suffix."""


def given_path(name: str, given: object) -> Path:
    """Return a value as a path; raise InputError if no file can have the name."""
    try:
        os.fsencode(path := Path(given))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"{arg(name)} must be a path, got {given!r:.60}") from None
    if "\0" in str(path):
        raise InputError(f"{arg(name)} must be a path, got {given!r:.60}")
    return path


def is_path_component(name: str) -> bool:
    """Return whether a name is that of one entry of a folder, on any system.

    This is false for a name that leads elsewhere ("..", "a/b", "/etc"), that no file can have, or
    that a terminal would not show as written.

    Args:
        name: The name.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return False
    try:
        return len(name.encode()) <= _MOST_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def path_component(name: object, what: str) -> str:
    """Return a name that a file contains and that becomes one part of a path.

    Args:
        name: The name, as in the file.
        what: What the name belongs to, for the message, such as "a task of log.json".

    Returns:
        The name, unchanged.

    Raises:
        InputError: The name is not that of one entry of a folder.
    """
    if isinstance(name, str) and is_path_component(name):
        return name
    raise InputError(
        f"{what} is called {name!r:.80}, which cannot name a file or folder; rename it in the "
        f"file (one name without '/' or '\\', of at most {_MOST_BYTES} bytes)"
    )


def file_name(text: str) -> str:
    """Convert a text to the name of an entry of a folder; different texts may get one name.

    Args:
        text: The text, such as the name of a task.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip(".")[:80] or "unnamed"
