"""Loads data sets of the Hugging Face hub."""

from collections.abc import Sequence
from typing import Any

from treegen.errors import DataError, InputError, arg


def load_table(
    dataset: str, split: str, *, splits: Sequence[str], instead: str, path: str = "", **options: Any
) -> Any:
    """Return one split of a data set as a table of rows.

    Args:
        dataset: Name of the data set, also for messages.
        split: The split to load.
        splits: All splits of the data set.
        instead: For messages: what a user without access to the hub can use instead.
        path: First argument of `datasets.load_dataset` if it is not the name, to load another
            format.
        options: Further arguments of `datasets.load_dataset`.

    Raises:
        InputError: The split does not exist.
        DataError: The package datasets is not installed, or the table cannot be loaded.
    """
    if split not in splits:
        known = " and ".join(splits) if len(splits) == 2 else ", ".join(splits)
        raise InputError(
            f"{dataset} has the splits {known}, not {split!r}; give {arg('split=')} one of them"
        )
    try:
        # datasets is slow to import, and files do not need it.
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{dataset} needs the package datasets: pip install datasets") from None
    try:
        return load_dataset(path or dataset, split=split, **options)
    except Exception as error:
        # datasets raises many types: no connection, nothing cached, a broken download.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"cannot load {dataset}: {reason}; or give {instead}") from error


def keep_encoded_images(table: Any) -> Any:
    """Return a table of the hub whose images stay undecoded, as bytes of their files."""
    features = getattr(table, "features", None)
    if not features:
        return table
    from datasets import Image

    for name, feature in features.items():
        if isinstance(feature, Image):
            table = table.cast_column(name, Image(decode=False))
    return table
