"""Rows of a data set: from a file of any usual kind, a folder of splits, the hub, or bundled."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from treegen.errors import DataError, InputError
from treegen.tasks.common.hub import load_table
from treegen.tasks.common.jsonl import parse_rows, read_rows, text_field

Rows = Iterable[tuple[int, dict[str, Any]]]
_KINDS: Final = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class HubTable:
    """A data set of the Hugging Face hub.

    splits: the splits that it has; the first is the one to ask.
    configs: the names of its parts, all of which are read; empty if it has none.
    """

    name: str
    splits: tuple[str, ...]
    configs: tuple[str, ...] = ()

    def rows(self, split: str | None, instead: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a split, numbered from 1 over all parts.

        instead: what a user without the hub may give, for messages.

        Raises:
            InputError: there is no such split.
            DataError: the data set cannot be loaded.
        """
        number = 0
        for config in self.configs or (None,):
            named = {} if config is None else {"name": config}
            wanted = split or self.splits[0]
            table = load_table(self.name, wanted, splits=self.splits, instead=instead, **named)
            for row in table:
                number += 1
                yield number, dict(row)


def bundled_rows(name: str, split: str | None) -> Rows:
    """Return the rows of a file that is installed with treegen; raise DataError for a split."""
    if split is not None:
        raise DataError(f"the bundled problems have no split {split!r}; give a data file")
    return parse_rows(files("treegen.tasks").joinpath("data", name).read_bytes(), name)


def file_rows(data: str, split: str | None, default: str = "test") -> tuple[Rows, str]:
    """Return the rows of a file, or of a split's file in a folder, and the file's path.

    A file is JSON Lines, CSV with a header, or Parquet; its ending tells which.

    Raises:
        InputError: a split of what is no folder.
        DataError: there is no such file, or it cannot be read.
    """
    path = Path(data)
    if path.is_dir():
        names = [f"{split or default}{kind}" for kind in _KINDS]
        path = next((path / name for name in names if (path / name).exists()), path / names[0])
    elif split is not None:
        raise InputError(f"split {split!r} needs a folder or a named data set, not {data!r}")
    if path.suffix == ".csv":
        return _csv_rows(path), str(path)
    return (_parquet_rows(path) if path.suffix == ".parquet" else read_rows(path)), str(path)


def column(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text of the first of some columns that a row has; case does not count.

    Raises:
        ValueError: the row has none of them, or it is blank or no text.
    """
    known = {name.strip().casefold(): value for name, value in row.items() if name is not None}
    for name in names:
        if (value := known.get(name.casefold())) is not None:
            if isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            return text_field({name: value}, name)
    raise ValueError(f"no {' or '.join(names)}; it has {', '.join(map(str, row)) or 'nothing'}")


def optional(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the text of the first of some columns that a row has; None if it has none."""
    try:
        return column(row, names)
    except ValueError:
        return None


def _csv_rows(path: Path) -> Rows:
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8") from None
    reader = csv.DictReader(io.StringIO(content, newline=""))
    start = 2
    try:
        for row in reader:
            yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {start}: {error}") from None


def _parquet_rows(path: Path) -> Rows:
    try:
        # It comes with datasets and is slow to import.
        import pyarrow.parquet as parquet

        table = parquet.read_table(path)
    except ImportError:
        raise DataError(f"{path} needs the package pyarrow: pip install pyarrow") from None
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"cannot read {path}: {told}") from None
    return enumerate(table.to_pylist(), start=1)
