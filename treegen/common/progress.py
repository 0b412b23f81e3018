"""A progress bar by tqdm: a widget in a notebook, otherwise text on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from treegen.errors import InputError

_Item = TypeVar("_Item")


def show_progress(
    items: Iterable[_Item], total: int, progress: bool | None, unit: str = "samples"
) -> Iterator[_Item]:
    """Yield items, and show how many of them have arrived.

    Args:
        items: The items.
        total: Number of items to expect.
        progress: Whether to show a bar; None shows one in a notebook only.
        unit: Name of the items.
    """
    if not (in_notebook() if progress is None else progress):
        return iter(items)
    from tqdm.auto import tqdm

    bar: Iterator[_Item] = iter(tqdm(items, total=total, unit=f" {unit}"))
    return bar


def check_progress(progress: object) -> None:
    """Raise InputError unless this is True, False or None."""
    if progress is not None and not isinstance(progress, bool):
        raise InputError(f"progress must be True, False or None, got {progress!r:.60}")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return shell is not None and hasattr(shell, "kernel")
