"""Sources of a task's rows, published files, the hub or a bundled file, and their description.

Problems are made from rows: they get ids, and rows that cannot be used are reported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from treegen.errors import DataError, InputError, Message, arg
from treegen.evals.problem import Skipped
from treegen.evals.task import TaskOptions
from treegen.tasks.common.files import KINDS, Rows, find_place, parse_content, read_any, text_field

_Row = TypeVar("_Row")


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


_Problem = TypeVar("_Problem", bound=_HasId)
TASK_PAGE: Final = "; see the fields that the task reads (docs/tasks.md)"


def row_id(row: dict[str, Any], line: int, task: str) -> str:
    """Return the id of a row; by default its task's name and its line.

    Default ids count lines from 0, like the rows of the hub's tables, so that ids agree.

    Args:
        row: The row; its field "id" is used if present.
        line: Line number of the row, from 1.
        task: Name of the task.

    Raises:
        ValueError: The id is neither text nor an integer.
    """
    value = row.get("id")
    if value is None:
        return f"{task}-{line - 1}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("id must be text or an integer")
    return text_field({"id": str(value)}, "id")


def problems_of(
    rows: Iterable[tuple[int, _Row]],
    source: str,
    make: Callable[[_Row, int], _Problem],
    *,
    noun: str = "problem",
    fatal: tuple[type[ValueError], ...] = (),
) -> tuple[tuple[_Problem, ...], tuple[Skipped, ...]]:
    """Return the problems of numbered rows, and the rows that cannot be used.

    Args:
        rows: Rows with their line numbers, from 1.
        source: Name of the data, for messages.
        make: Makes a problem from a row and its line; raises ValueError with the reason if it
            cannot.
        noun: Word for a problem in errors.
        fatal: Errors of `make` that are raised, instead of leaving out the row.

    Raises:
        DataError: Two problems have the same id, or there is no problem.
    """
    problems: dict[str, _Problem] = {}
    place_of: dict[str, tuple[str, int]] = {}
    skipped: list[Skipped] = []
    for number, row in rows:
        file, line = find_place(number, source)
        try:
            problem = make(row, int(number))
        except fatal:
            raise
        except ValueError as error:
            skipped.append(Skipped(file, line, str(error)))
            continue
        if first := place_of.get(problem.id):
            places = f"{file}, lines {first[1]} and {line}"
            if file != first[0]:
                places = f"{first[0]}, line {first[1]}, and {file}, line {line},"
            raise DataError(
                f"{places} have the same id {problem.id!r}; change the id, or remove one of the "
                "lines"
            )
        problems[problem.id], place_of[problem.id] = problem, (file, line)
    if not problems:
        reason = f"; {skipped[0]}" if skipped else ""
        raise DataError(f"{source} has no usable {noun}{reason}{TASK_PAGE}")
    return tuple(problems.values()), tuple(skipped)


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
        names = " and ".join(splits) if len(splits) == 2 else ", ".join(splits)
        raise InputError(f"{dataset} has no split {split!r}; set {arg('split=')} to one of {names}")
    try:
        # datasets is slow to import, and files do not need it.
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"{dataset} needs the package datasets; install it with: pip install datasets"
        ) from None
    try:
        return load_dataset(path or dataset, split=split, **options)
    except Exception as error:
        # datasets raises many types: no connection, nothing cached, a broken download.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{dataset} could not be loaded: {reason}; to work without the hub, use {instead}"
        ) from error


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


@dataclass(frozen=True, slots=True)
class HubTable:
    """A data set of the Hugging Face hub."""

    name: str
    splits: tuple[str, ...] = ("test",)
    """All splits of the data set; the first is the default."""
    configs: tuple[str, ...] = ()
    """The names of its configurations, all of which are read; empty if it has none."""
    instead: str = "a data file"
    """For messages: what a user without access to the hub can use instead."""

    def rows(self, split: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a split, numbered from 1 across all configurations.

        Raises:
            InputError: The split does not exist.
            DataError: The data set cannot be loaded.
        """
        number = 0
        for config in self.configs or (None,):
            named = {} if config is None else {"name": config}
            split_name = split or self.splits[0]
            table = load_table(
                self.name, split_name, splits=self.splits, instead=self.instead, **named
            )
            for row in keep_encoded_images(table):
                number += 1
                yield number, dict(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The places from which a task's rows can come."""

    task: str
    """The task's name, for messages."""
    bundled: str
    """The file of the task's own problems that comes with treegen."""
    hub: HubTable | None = None
    """The data set on the hub, whose first split is the default; None if there is none."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For each split, the names of its published files in a folder. See `file_rows`."""

    def read(self, data: str | None, split: str | None) -> tuple[Rows, str]:
        """Return the rows of a split and the name of their source; see TaskOptions for `data`.

        Raises:
            InputError: The data have no splits, or the hub does not have this one.
            DataError: The data cannot be read.
        """
        default = self.hub.splits[0] if self.hub else "test"
        if data is None:
            rows = bundled_rows(self.bundled, None if split == default else split)
            return rows, f"bundled {self.bundled}"
        if self.hub is not None and self.on_hub(data):
            return self.hub.rows(split), f"{self.hub.name} {split or default}"
        return self.from_files(data, split, default)

    def from_files(self, data: str, split: str | None, default: str) -> tuple[Rows, str]:
        """Return the rows of a file or a folder, and its path.

        Args:
            data: Path of a file, or of a folder with a file for each split.
            split: The split to read from a folder; None for `default`.
            default: The split to read from a folder if `split` is None.

        Raises:
            InputError: A split is named, but `data` is not a folder.
            DataError: The file does not exist or cannot be read.
        """
        return file_rows(data, split, default, self.files)

    def on_hub(self, data: str | None) -> bool:
        """Return whether `data` names the data set on the hub."""
        return self.hub is not None and data in ("hf", self.hub.name)

    def train(self, data: str | None) -> tuple[Rows, str]:
        """Return the rows of the train split that belongs to `data`, and the name of their source.

        Raises:
            DataError: There is no train split, or it cannot be read.
        """
        if data is None:
            raise DataError(f"the bundled problems of {self.task} have no train split; pass a file")
        if self.on_hub(data):
            return self.read(data, "train")
        path = Path(data)
        folder = path if path.is_dir() else path.parent
        return self.from_files(str(folder), "train", "train")


def bundled_rows(name: str, split: str | None = None) -> Rows:
    """Return the rows of a file installed with treegen; raise DataError if `split` is set."""
    if split is not None:
        raise DataError(f"the bundled problems have no split {split!r}; pass a data file")
    return parse_content(files("treegen.tasks").joinpath("data", name).read_bytes(), name)


def file_rows(
    data: str,
    split: str | None,
    default: str = "test",
    names: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Rows, str]:
    """Return the rows of a file, or of a split's file in a folder, and the file's path.

    Args:
        data: Path of a file, or of a folder with a file for each split.
        split: The split to read from a folder; None for `default`.
        default: The split to read from a folder if `split` is None.
        names: For each split, the names of published files to look for in a folder. The split's
            name with an ending in `KINDS` is looked for after these.

    Raises:
        InputError: A split is named, but `data` is not a folder.
        DataError: The file does not exist or cannot be read.
    """
    path = Path(data)
    if path.is_dir():
        split_name = split or default
        candidates = [
            *(names or {}).get(split_name, ()),
            *(f"{split_name}{kind}" for kind in KINDS),
        ]
        paths = [path / name for name in candidates if (path / name).is_file()]
        if not paths:
            raise DataError(
                f"{' or '.join(candidates)} was not found in {path}; set {arg('split=')} to "
                "another split"
            )
        path = paths[0]
    elif split is not None:
        raise InputError(
            f"split {split!r} needs a folder or a named data set, got {data!r}; remove "
            f"{arg('split=')}"
        )
    return read_any(path), str(path)


LABEL = "bundled problems"
EXAMPLES = "bundled examples"


def is_bundled(data: str | None) -> bool:
    """Return whether the problems come with treegen instead of being the published ones."""
    package = Path(str(files("treegen"))).absolute()
    return data is None or Path(data).absolute().is_relative_to(package)


def make_data_label(data: str | None, *, own_examples: bool = False) -> str:
    """Return the label that tables show after the task's name; "" for published or a user's data.

    Args:
        data: The data that the user chose, as in `TaskOptions`; None for the bundled problems.
        own_examples: Whether the prompts contain few-shot examples that come with treegen.
    """
    return LABEL if is_bundled(data) else EXAMPLES if own_examples else ""


def own_examples(options: TaskOptions, num: int) -> bool:
    """Return whether the examples are treegen's own, not from a split or a file of the user."""
    return num > 0 and options.fewshot_data is None and is_bundled(options.fewshot_file)


def describe_problems(data: str | None, source: str, num: int) -> str:
    """Return one line that describes where the problems come from.

    Args:
        data: The data that the user chose, as in `TaskOptions`.
        source: Where the task read the problems from.
        num: The number of problems.
    """
    if is_bundled(data):
        name = source.removeprefix("bundled ").rpartition("/")[2]
        origin = f"which comes with treegen; {arg('data=')} takes the published ones"
        return Message(f"problems: {num:,} of {name}, {origin}")
    return f"problems: {num:,} of {source}"


def describe_examples(options: TaskOptions, num: int) -> str:
    """Return one line that describes where the few-shot examples come from."""
    if not num:
        return "examples: none"
    if options.fewshot_data is not None:
        return f"examples: {num} drawn from {options.fewshot_data} with seed {options.seed}"
    if options.fewshot_file is not None:
        origin = ", which comes with treegen" if is_bundled(options.fewshot_file) else ""
        return f"examples: the first {num} of {options.fewshot_file}{origin}"
    return Message(
        f"examples: {num} that come with treegen; {arg('fewshot_file=')} takes the published ones, "
        f"{arg('fewshot_data=')} draws from a file"
    )
