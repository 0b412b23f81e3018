"""Reads APPS: the official folders, its JSON Lines, the hub, or the bundled set.

The tests of the whole data set take more than a gigabyte. So a row's tests and solutions are not
kept in memory: they are read once to check them, and again when they are needed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from treegen.common.files import MAX_LINE_BYTES, describe_read_error, open_regular, read_lines
from treegen.errors import DataError, InputError, arg
from treegen.evals.problem import Skipped
from treegen.tasks.apps.compare import Comparer
from treegen.tasks.common.files import RowNumber, read_data, text_field
from treegen.tasks.common.sources import load_table, problems_of
from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import TestCase

# int(text) fails for more digits than Python's limit. Decimal has no limit.
_MAX_INT_DIGITS: Final = 4000

# The published checker puts this before every program, and solutions in the data rely on it.
PRELUDE: Final = """\
import collections, fractions, heapq, itertools, math, random, sys, time
import numpy as np
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from functools import lru_cache
from heapq import *
from itertools import accumulate, combinations, permutations, product
from math import ceil, cos, exp, fabs, floor, gcd, log, log2, sin, sqrt, tan
from typing import List, Tuple
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """All tests of one problem."""

    fn_name: str | None
    """The function to call; None for programs that print."""
    inputs: tuple[Any, ...]
    """Texts for programs that print, otherwise lists of arguments."""
    outputs: tuple[Any, ...]
    """Texts for programs that print, otherwise expected values."""

    def cases(self, comparer: Comparer) -> ProgramCases:
        """Return the tests for the sandbox."""
        pairs = zip(self.inputs, self.outputs, strict=True)
        if self.fn_name is None:
            tests = [TestCase(stdin=text, expected=answer) for text, answer in pairs]
            return ProgramCases(tuple(tests), comparer.stdout, PRELUDE)
        may_unwrap = all(isinstance(value, list) and len(value) == 1 for value in self.outputs)
        tests = [
            TestCase(args=comparer.arguments(values), expected=answer) for values, answer in pairs
        ]

        def compare(output: Any, expected: Any) -> bool:
            return comparer.value(output, expected, may_unwrap)

        return ProgramCases(tuple(tests), compare, PRELUDE, self.fn_name)


def read_suite(text: str) -> Suite:
    """Return the tests in a JSON text.

    Raises:
        ValueError: There are no tests, so every program would pass, or they cannot be run.
    """
    content = json_value(text) if text.strip() else {}
    if not isinstance(content, dict):
        raise ValueError("input_output must be a JSON object")
    inputs, outputs, fn_name = content.get("inputs"), content.get("outputs"), content.get("fn_name")
    if not inputs or not outputs:
        raise ValueError("the row has no tests")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs must be lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"the row has {len(inputs)} inputs but {len(outputs)} outputs")
    if fn_name is None:
        return Suite(None, tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise ValueError(f"fn_name {str(fn_name)[:40]!r} is not a Python name")
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("the inputs of a function must be lists of arguments")
    return Suite(fn_name, tuple(inputs), tuple(outputs))


def json_value(text: str) -> Any:
    """Return the value of a JSON text, however long its numbers.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(
            text, parse_int=lambda n: int(n) if len(n) < _MAX_INT_DIGITS else int(Decimal(n))
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _text(value: Any) -> str:
    """Return an input or output as text, from a text or a list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("an input or output must be text or a list of lines")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("an input or output contains half of a surrogate pair") from None
    return value


HUB_NAMES: Final = ("hf", "codeparrot/apps")
_HUB_SPLITS: Final = ("train", "test")
BUNDLED: Final = "apps_sample.jsonl"
BUNDLED_SHOTS: Final = "apps_fewshot.jsonl"
DIFFICULTIES: Final = ("introductory", "interview", "competition")
UNKNOWN: Final = "unknown"

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of the data."""

    id: str
    question: str
    difficulty: str
    url: str
    starter: str
    """The starter code; empty if there is none."""
    fn_name: str | None
    """The function that the tests call; None if programs print."""
    num_tests: int
    digest: str
    """A hash of its tests."""
    line: int
    """Its line in the file, from 1."""
    read: Callable[[], Fields]
    """Reads the fields of the row again, including input_output and solutions."""

    @property
    def suite(self) -> Suite:
        """Its tests."""
        return read_suite(_optional(self.read(), "input_output"))

    @property
    def solutions(self) -> list[str]:
        """The reference solutions; there may be none.

        Raises:
            ValueError: The solutions are not a list of texts.
        """
        text = _optional(self.read(), "solutions")
        solutions = json_value(text) if text.strip() else []
        if not isinstance(solutions, list) or not all(
            isinstance(solution, str) for solution in solutions
        ):
            raise ValueError("solutions must be a list of texts")
        return solutions


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """All usable problems of a source, and the rows that cannot be used."""

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    source: str


_Readers = Iterable[tuple[int, Callable[[], Fields]]]
"""Line numbers, from 1, and functions that read the rows."""


def load_rows(data: str | None, split: str | None) -> LoadedRows:
    """Read every problem of a data set.

    Args:
        data: Path or name of the data; see TaskOptions.
        split: The split to read; None for the default.

    Raises:
        DataError: The data cannot be read, or have no usable problem.
        InputError: A split is named, but `data` is neither a folder nor a named data set.
    """
    if data is None:
        if split not in (None, "test"):
            raise DataError(f"the bundled problems have no split {split!r}; pass a data folder")
        return _load(_lines(_bundled_path(BUNDLED)), f"bundled {BUNDLED}")
    if data in HUB_NAMES:
        split = split or "test"
        return _load(_hub(split), f"codeparrot/apps {split}")
    path = Path(data)
    if not path.is_dir():
        if split is not None:
            raise InputError(
                f"split {split!r} needs a folder or a named data set, got {data!r}; remove "
                f"{arg('split=')}"
            )
        return _load(_lines(path), str(path))
    return load_split(path, split)


def load_split(path: Path, split: str | None) -> LoadedRows:
    """Read a split of a folder. The split is a folder of problems, or a file of JSON Lines.

    Without a split, the folder may itself be a folder of problems.

    Raises:
        DataError: The folder has no such split, or the split cannot be read.
    """
    split_dir = path / (split or "test")
    if split_dir.is_dir():
        return _load(_folders(split_dir), str(split_dir))
    if (file := split_dir.with_name(f"{split_dir.name}.jsonl")).is_file():
        return _load(_lines(file), str(file))
    if split is None and any(path.glob("*/question.txt")):
        return _load(_folders(path), str(path))
    raise DataError(
        f"{path} has neither {split_dir.name}/ nor {split_dir.name}.jsonl; set {arg('split=')} to "
        "another split, or pass a folder with one folder per problem or a JSON Lines file"
    )


def load_bundled_shots() -> LoadedRows:
    """Read the bundled few-shot examples."""
    return _load(_lines(_bundled_path(BUNDLED_SHOTS)), f"bundled {BUNDLED_SHOTS}")


def _bundled_path(name: str) -> Path:
    return Path(str(files("treegen.tasks").joinpath("data", name)))


def _load(readers: _Readers, source: str) -> LoadedRows:
    return LoadedRows(*problems_of(readers, source, _row, fatal=(DataError,)), source)


def _row(read: Callable[[], Fields], line: int) -> Row:
    fields = dict(read())
    tests = _optional(fields, "input_output")
    suite = read_suite(tests)
    return Row(
        id=_id(fields, line),
        question=text_field(fields, "question"),
        difficulty=_optional(fields, "difficulty") or UNKNOWN,
        url=_optional(fields, "url"),
        starter=_optional(fields, "starter_code"),
        fn_name=suite.fn_name,
        num_tests=len(suite.inputs),
        digest=hashlib.sha256(tests.encode("utf-8", "surrogatepass")).hexdigest(),
        line=line,
        read=read,
    )


def _id(fields: Fields, line: int) -> str:
    value = fields.get("problem_id", fields.get("id"))
    if value is None:
        value = line - 1
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("problem_id must be text or an integer")
    # The names of the official folders have four digits or more.
    text = f"{value:04d}" if isinstance(value, int) else value
    return text_field({"problem_id": text}, "problem_id")


def _optional(fields: Fields, name: str) -> str:
    """Return a text field that may be missing. Tests and solutions may be JSON values instead."""
    value = fields.get(name)
    if value is None:
        return ""
    if name in ("input_output", "solutions") and isinstance(value, dict | list):
        return json.dumps(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    return value


def _lines(path: Path) -> _Readers:
    r"""Yield the rows of JSON Lines. Only \n ends a line."""
    offset = 0
    try:
        for line, content in enumerate(read_lines(path), start=1):
            if content.strip(b"\xef\xbb\xbf \t\r\n"):
                yield line, partial(_line, path, offset, line)
            offset += len(content)
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None


def _line(path: Path, offset: int, line: int) -> Fields:
    where = f"{path}, line {line}"
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(offset)
            row = json_value(file.readline(MAX_LINE_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8; save the file as UTF-8") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}; fix or remove the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object; fix or remove the line")
    return row


def _folders(path: Path) -> _Readers:
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        yield RowNumber(1, folder, 1), partial(_folder, folder)


def _folder(folder: Path) -> Fields:
    """Return the files of a problem's folder, under the field names of the JSON Lines."""
    metadata = json_value(_file(folder / "metadata.json") or "{}")
    if not isinstance(metadata, dict):
        raise ValueError("metadata.json must be a JSON object")
    return {
        "problem_id": folder.name,
        "question": _file(folder / "question.txt"),
        "input_output": _file(folder / "input_output.json"),
        "solutions": _file(folder / "solutions.json"),
        "starter_code": _file(folder / "starter_code.py"),
        "difficulty": metadata.get("difficulty"),
        "url": metadata.get("url"),
    }


def _file(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist."""
    try:
        if not path.exists():
            return None
        return read_data(path).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not UTF-8") from None


def _hub(split: str) -> _Readers:
    # Read the data set's files, because datasets does not run the repository's loading script.
    table = load_table(
        "codeparrot/apps",
        split,
        splits=_HUB_SPLITS,
        instead=f"its {split}.jsonl or a folder",
        path="json",
        data_files={split: f"hf://datasets/codeparrot/apps/{split}.jsonl"},
    )
    for index in range(len(table)):
        yield index + 1, partial(table.__getitem__, index)
