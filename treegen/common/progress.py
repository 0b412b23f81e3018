"""A progress bar by tqdm: a widget in a notebook, otherwise text on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from treegen.errors import InputError

_Item = TypeVar("_Item")


def show_progress(items: Iterable[_Item], total: int, progress: bool | None) -> Iterator[_Item]:
    """Yield items, and show how many of them have arrived.

    Args:
        items: The items.
        total: Number of items to expect.
        progress: Whether to show a bar; None shows one in a notebook only.
    """
    if not (in_notebook() if progress is None else progress):
        return iter(items)
    bar: Iterator[_Item] = iter(load_tqdm()(items, total=total, unit=" samples"))
    return bar


def load_tqdm() -> Any:
    """Return tqdm's class: a widget in a notebook that can show widgets, otherwise text."""
    import tqdm

    if in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm import notebook

        return notebook.tqdm
    return tqdm.tqdm


def silence_tqdm_warning() -> None:
    """Import `tqdm.auto` in a notebook without its warning that widgets are not installed.

    transformers and huggingface_hub import it, and treegen shows a bar of text instead.
    """
    if in_notebook():
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("tqdm.auto")


def check_progress(progress: object) -> None:
    """Raise InputError unless this is True, False or None."""
    if progress is not None and not isinstance(progress, bool):
        raise InputError(f"progress must be True, False or None, got {progress!r:.60}")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return shell is not None and hasattr(shell, "kernel")
