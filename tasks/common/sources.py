"""Where a task's rows come from: files as they are published, the hub, or a bundled file."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from treegen.errors import DataError, InputError
from treegen.tasks.common.hub import load_table
from treegen.tasks.common.jsonl import parse_rows

_BOM: Final = b"\xef\xbb\xbf"

Rows = Iterable[tuple[int, dict[str, Any]]]
"""Rows with their lines, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The places that a task's rows may come from.

    task: the task's name, for messages.
    bundled: the file of the task's own problems that comes with treegen.
    hub: the name of the data set on the hub; empty if there is none.
    config: which of its parts, if it has parts.
    splits: the splits that it has on the hub; the first is the default.
    files: by split, the names that the published files have in a folder. `{split}.jsonl` is one of
        them for every split.
    """

    task: str
    bundled: str
    hub: str
    config: str | None = None
    splits: Sequence[str] = ("test",)
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read(self, data: str | None, split: str | None) -> tuple[Rows, str]:
        """Return the rows of a split and where they are from; see TaskOptions for `data`.

        Raises:
            InputError: a split is named where there are none, or one that the hub does not have.
            DataError: the data cannot be read.
        """
        if data is None:
            if split not in (None, self.splits[0]):
                raise DataError(f"the bundled problems have no split {split!r}; give a data file")
            content = files("treegen.tasks").joinpath("data", self.bundled).read_bytes()
            return _parsed(content, self.bundled), f"bundled {self.bundled}"
        if self.on_hub(data):
            split = split or self.splits[0]
            table = load_table(
                self.hub, split, splits=self.splits, instead="a data file", name=self.config
            )
            rows = ((line, dict(row)) for line, row in enumerate(table, start=1))
            return rows, f"{self.hub} {split}"
        path = Path(data)
        if path.is_dir():
            path = self._file(path, split or self.splits[0])
        elif split is not None:
            raise InputError(f"split {split!r} needs a folder or a named data set, not {data!r}")
        return read_any(path), str(path)

    def on_hub(self, data: str | None) -> bool:
        """Return whether `data` stands for the data set on the hub."""
        return bool(self.hub) and data in ("hf", self.hub)

    def train(self, data: str | None) -> tuple[Rows, str]:
        """Return the rows of the train split that goes with `data`, and where they are from.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        if data is None:
            raise DataError(f"the bundled problems of {self.task} have no train split; give a file")
        if self.on_hub(data):
            return self.read(data, "train")
        path = Path(data)
        folder = path if path.is_dir() else path.parent
        found = self._file(folder, "train")
        return read_any(found), str(found)

    def _file(self, folder: Path, split: str) -> Path:
        names = [*self.files.get(split, ()), f"{split}.jsonl"]
        for name in names:
            if (folder / name).is_file():
                return folder / name
        raise DataError(f"{folder} has no {' or '.join(names)}; name another split with --split")


def read_any(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of JSON Lines, of a JSON list, or of either in a file that ends in .gz.

    Raises:
        DataError: the file cannot be read, or has another form.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return _parsed(content, str(path))


def _parsed(content: bytes, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if source.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{source} is not a gzip file: {error}") from None
    if not content.removeprefix(_BOM).lstrip().startswith(b"["):
        return parse_rows(content, source)
    try:
        found = json.loads(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not a JSON list: {error}") from None
    if not found or not all(isinstance(row, dict) for row in found):
        raise DataError(f"{source} is not a list of JSON objects")
    return iter(list(enumerate(found, start=1)))
