"""Data sets of the Hugging Face hub."""

from collections.abc import Sequence
from typing import Any

from treegen.errors import DataError, InputError


def load_table(
    dataset: str, split: str, *, splits: Sequence[str], instead: str, path: str = "", **options: Any
) -> Any:
    """Return one split of a data set, a table of rows.

    dataset: its name, for messages too. splits: those that it has. instead: what a user without
    the hub may give. path, options: what `datasets.load_dataset` is given; path is the name of the
    data set, unless it is to be read in another way.

    Raises:
        InputError: there is no such split.
        DataError: the package datasets is not installed, or the table cannot be loaded.
    """
    if split not in splits:
        known = " and ".join(splits) if len(splits) == 2 else ", ".join(splits)
        raise InputError(f"{dataset} has the splits {known}, not {split!r}")
    try:
        # Slow to import, and not needed for files.
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{dataset} needs the package datasets: pip install datasets") from None
    try:
        return load_dataset(path or dataset, split=split, **options)
    except Exception as error:
        # No connection, no such cache, a broken download: datasets raises them as many types.
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"cannot load {dataset}: {told}; or give {instead}") from error
