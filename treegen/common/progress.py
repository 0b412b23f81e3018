"""A bar that shows how far a call is, by tqdm: in a notebook as a widget, else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from treegen.errors import InputError

_Item = TypeVar("_Item")


def show_progress(
    items: Iterable[_Item], total: int, progress: bool | None, unit: str = "samples"
) -> Iterator[_Item]:
    """Yield items, and show how many of them have come.

    Args:
        total: How many will.
        progress: Whether to show it; None does so in a notebook.
    """
    if not (in_notebook() if progress is None else progress):
        return iter(items)
    from tqdm.auto import tqdm

    found: Iterator[_Item] = iter(tqdm(items, total=total, unit=f" {unit}"))
    return found


def check_progress(progress: object) -> None:
    """Raise InputError for what says neither to show a bar nor to show none."""
    if progress is not None and not isinstance(progress, bool):
        raise InputError(f"progress must be True, False or None, got {progress!r:.60}")


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return shell is not None and hasattr(shell, "kernel")
