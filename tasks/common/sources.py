"""Where a task's rows come from: files as they are published, the hub, or a bundled file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from treegen.errors import DataError, InputError
from treegen.tasks.common.files import KINDS, Rows, parse_content, read_any
from treegen.tasks.common.hub import keep_encoded_images, load_table


@dataclass(frozen=True, slots=True)
class HubTable:
    """A data set of the Hugging Face hub.

    splits: the splits that it has; the first is the one to ask.
    configs: the names of its parts, all of which are read; empty if it has none.
    instead: what a user without the hub may give, for messages.
    """

    name: str
    splits: tuple[str, ...] = ("test",)
    configs: tuple[str, ...] = ()
    instead: str = "a data file"

    def rows(self, split: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a split, numbered from 1 over all parts.

        Raises:
            InputError: there is no such split.
            DataError: the data set cannot be loaded.
        """
        number = 0
        for config in self.configs or (None,):
            named = {} if config is None else {"name": config}
            wanted = split or self.splits[0]
            table = load_table(self.name, wanted, splits=self.splits, instead=self.instead, **named)
            for row in keep_encoded_images(table):
                number += 1
                yield number, dict(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The places that a task's rows may come from.

    task: the task's name, for messages.
    bundled: the file of the task's own problems that comes with treegen.
    hub: the data set on the hub, whose first split is the default; None if there is none.
    files: by split, the names that the published files have in a folder. See `file_rows`.
    """

    task: str
    bundled: str
    hub: HubTable | None = None
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read(self, data: str | None, split: str | None) -> tuple[Rows, str]:
        """Return the rows of a split and where they are from; see TaskOptions for `data`.

        Raises:
            InputError: a split is named where there are none, or one that the hub does not have.
            DataError: the data cannot be read.
        """
        default = self.hub.splits[0] if self.hub else "test"
        if data is None:
            rows = bundled_rows(self.bundled, None if split == default else split)
            return rows, f"bundled {self.bundled}"
        if self.hub is not None and self.on_hub(data):
            return self.hub.rows(split), f"{self.hub.name} {split or default}"
        return self.from_files(data, split, default)

    def from_files(self, data: str, split: str | None, default: str) -> tuple[Rows, str]:
        """Return the rows of a file or a folder, and its path; raises as `file_rows` does."""
        return file_rows(data, split, default, self.files)

    def on_hub(self, data: str | None) -> bool:
        """Return whether `data` stands for the data set on the hub."""
        return self.hub is not None and data in ("hf", self.hub.name)

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
        return self.from_files(str(folder), "train", "train")


def bundled_rows(name: str, split: str | None = None) -> Rows:
    """Return the rows of a file that is installed with treegen; raise DataError for a split."""
    if split is not None:
        raise DataError(f"the bundled problems have no split {split!r}; give a data file")
    return parse_content(files("treegen.tasks").joinpath("data", name).read_bytes(), name)


def file_rows(
    data: str,
    split: str | None,
    default: str = "test",
    names: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Rows, str]:
    """Return the rows of a file, or of a split's file in a folder, and the file's path.

    Args:
        default: The split of a folder if none is asked for.
        names: By split, the names that published files have in a folder, beside the split's own
            with one of `KINDS`.

    Raises:
        InputError: a split of what is no folder.
        DataError: there is no such file, or it cannot be read.
    """
    path = Path(data)
    if path.is_dir():
        wanted = split or default
        known = [*(names or {}).get(wanted, ()), *(f"{wanted}{kind}" for kind in KINDS)]
        found = [path / name for name in known if (path / name).is_file()]
        if not found:
            raise DataError(f"{path} has no {' or '.join(known)}; name another split with --split")
        path = found[0]
    elif split is not None:
        raise InputError(
            f"split {split!r} needs a folder or a named data set, not {data!r}; leave split= out"
        )
    return read_any(path), str(path)
