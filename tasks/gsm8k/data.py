"""Reading GSM8K problems from a file, a directory, the hub, or the set that comes with treegen."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.problem import Problem, Skipped
from treegen.tasks.common.answers import canonical_number
from treegen.tasks.common.hub import load_table
from treegen.tasks.common.jsonl import parse_rows, read_rows, text_field
from treegen.tasks.common.problems import problems_of, row_id, split_file

HUB_NAMES: Final = ("hf", "openai/gsm8k")
_HUB_SPLITS: Final = ("train", "test")
_BUNDLED: Final = "gsm8k_sample.jsonl"

# Notes for a calculator, such as "<<48/2=24>>". The data's authors say to remove them from prompts.
_ANNOTATION: Final = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True, slots=True)
class LoadedProblems:
    """All usable problems of a source, and the rows that cannot be used."""

    problems: tuple[Problem, ...]
    skipped: tuple[Skipped, ...]
    source: str


def load_problems(data: str | None, split: str | None) -> LoadedProblems:
    """Read every problem of a data set; see TaskOptions for what `data` may be.

    Raises:
        DataError: the data cannot be read, or have no usable problem.
        InputError: a split is named, but `data` is neither a directory nor a named data set.
    """
    if data is None:
        if split not in (None, "test"):
            raise DataError(f"the bundled problems have no split {split!r}; give a data file")
        return _collect(parse_rows(read_bundled(_BUNDLED), _BUNDLED), f"bundled {_BUNDLED}")
    if data in HUB_NAMES:
        split = split or "test"
        return _collect(hub_rows(split), f"openai/gsm8k {split}")
    path = split_file(data, split, needs="a directory or a named data set")
    return _collect(read_rows(path), str(path))


def read_bundled(name: str) -> bytes:
    """Return a data file that is installed with treegen."""
    return files("treegen.tasks").joinpath("data", name).read_bytes()


def reasoning_and_number(answer: str) -> tuple[str, str]:
    """Split a reference answer at its last "####", without its calculator notes.

    An answer without "####" is a number as a whole.
    """
    reasoning, _, number = _ANNOTATION.sub("", answer).rpartition("####")
    return reasoning.rstrip(), number.strip()


def _collect(rows: Iterable[tuple[int, dict[str, Any]]], source: str) -> LoadedProblems:
    return LoadedProblems(*problems_of(rows, source, _problem), source)


def _problem(row: dict[str, Any], line: int) -> Problem:
    question = text_field(row, "question")
    answer = text_field(row, "answer")
    _, number = reasoning_and_number(answer)
    if canonical_number(number) is None:
        raise ValueError("answer does not end in '#### NUMBER'")
    return Problem(row_id(row, line, "gsm8k"), question, number, {"line": line, "solution": answer})


def hub_rows(split: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """Return the rows of one split from the hub, numbered from 1."""
    table = load_table(
        "openai/gsm8k", split, splits=_HUB_SPLITS, instead="a JSONL file", name="main"
    )
    return ((index, dict(row)) for index, row in enumerate(table, start=1))
