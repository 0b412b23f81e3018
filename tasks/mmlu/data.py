"""Reads MMLU questions from a folder of CSV files or from the hub.

The original CSV files have no header, and answers A to D. Other copies have a header, or answers 0
to 3. Both are accepted. Cells stay texts, because a reader that guesses types would drop the choice
"None" and turn "0.50" into 0.5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treegen.common.spelling import did_you_mean
from treegen.errors import DataError, InputError, arg
from treegen.evals.problem import Skipped
from treegen.tasks.common.files import csv_lines, text_field
from treegen.tasks.common.sources import load_table

LETTERS: Final = "ABCD"
_HUB_NAMES: Final = ("hf", "cais/mmlu")
_HUB_SPLITS: Final = ("test", "validation", "dev", "auxiliary_train")
_NUM_COLUMNS: Final = 6
_ANSWER_HEADS: Final = ("answer", "target", "label")


@dataclass(frozen=True, slots=True)
class Question:
    """One row."""

    subject: str
    index: int
    """Its index in its file, from 0, not counting headers."""
    text: str
    choices: tuple[str, ...]
    answer: str
    """The letter of the right choice."""
    line: int
    """Its line in the file, from 1."""

    @property
    def block(self) -> str:
        """The question and its lettered choices, as in all prompts."""
        lettered = zip(LETTERS, self.choices, strict=True)
        return "\n".join([self.text, *(f"{letter}. {choice}" for letter, choice in lettered)])

    @property
    def key(self) -> tuple[str, ...]:
        """A key that ignores differences in spacing and case."""
        return tuple(" ".join(text.split()).casefold() for text in (self.text, *self.choices))


@dataclass(frozen=True, slots=True)
class LoadedQuestions:
    """The questions of a data set, by subject in alphabetical order."""

    test: dict[str, list[Question]]
    """The questions of the run."""
    dev: dict[str, list[Question]]
    """Questions for the few-shot examples."""
    skipped: tuple[Skipped, ...]
    """Rows that cannot be used."""
    source: str
    """Name of the data set."""


def load_questions(
    data: str | None, split: str | None, subjects: Sequence[str], *, with_dev: bool
) -> LoadedQuestions:
    """Read a split, and the dev split for examples.

    Args:
        data: Path of a folder with a folder for each split, or "hf" for the hub.
        split: The split to read; None for "test".
        subjects: The subjects to read; empty for all.
        with_dev: Whether to read the dev split.

    Raises:
        InputError: No data are named, or there is no such split or subject.
        DataError: The data cannot be read.
    """
    if data is None:
        raise InputError(
            f"MMLU has no bundled problems; set {arg('data=')} to a folder with dev/ and test/, "
            "or to hf"
        )
    skipped: list[Skipped] = []
    if data in _HUB_NAMES:
        split = split or "test"
        test = _hub(split, subjects, skipped)
        dev = _hub("dev", list(test), []) if with_dev else {}
        return LoadedQuestions(test, dev, tuple(skipped), f"cais/mmlu {split}")
    folder, split = Path(data), split or "test"
    if not (folder / split).is_dir():
        raise DataError(
            f"the folder {split}/ was not found in {data}; pass a folder with dev/ and test/, "
            "which contain files such as anatomy_test.csv"
        )
    end = f"_{split}.csv"
    subjects_of_split = sorted(
        path.name.removesuffix(end) for path in (folder / split).glob(f"*{end}")
    )
    if not subjects_of_split:
        raise DataError(
            f"{folder / split} has no file with a name such as anatomy{end}; unpack the data again"
        )
    test, dev = {}, {}
    for subject in _select_subjects(subjects, subjects_of_split):
        test[subject] = read_csv(folder / split / f"{subject}{end}", subject, skipped)
        if with_dev:
            dev[subject] = read_csv(folder / "dev" / f"{subject}_dev.csv", subject, None)
    return LoadedQuestions(test, dev, tuple(skipped), str(folder / split))


def read_csv(path: Path, subject: str, skipped: list[Skipped] | None) -> list[Question]:
    """Return the usable rows of one file.

    Args:
        path: Path of the file.
        subject: Subject of its questions.
        skipped: Unusable rows are added to this list; if None, such a row is an error.

    Raises:
        DataError: The file cannot be read, counts answers from 1, or has an unusable row.
    """
    rows = list(csv_lines(path))
    if rows and rows[0][1][-1].strip().casefold() in _ANSWER_HEADS:
        del rows[0]
    if any(row[-1].strip() == str(len(LETTERS)) for _, row in rows):
        raise DataError(f"answers in {path} must be A to D, or 0 to 3, got 1 to 4")
    numbered = ((line, index, _of_row(row)) for index, (line, row) in enumerate(rows))
    return _collect(numbered, subject, str(path), skipped)


def _of_row(row: Sequence[str]) -> dict[str, Any]:
    if len(row) != _NUM_COLUMNS:
        return {"error": f"{len(row)} columns instead of {_NUM_COLUMNS}"}
    return {"question": row[0], "choices": list(row[1:-1]), "answer": row[-1]}


def _collect(
    rows: Iterable[tuple[int, int, dict[str, Any]]],
    subject: str,
    source: str,
    skipped: list[Skipped] | None,
) -> list[Question]:
    questions = []
    for line, index, row in rows:
        try:
            questions.append(_question(row, subject, index, line))
        except ValueError as error:
            if skipped is None:
                raise DataError(f"{source}, line {line}: {error}; fix or remove the line") from None
            skipped.append(Skipped(source, line, str(error)))
    return questions


def _question(row: dict[str, Any], subject: str, index: int, line: int) -> Question:
    if "error" in row:
        raise ValueError(row["error"])
    text, choices = text_field(row, "question"), row.get("choices")
    if not isinstance(choices, Sequence) or len(choices) != len(LETTERS):
        raise ValueError("choices must be four texts")
    # A choice must be text, but may be empty.
    texts = tuple(
        text_field({"choice": f"{choice} "}, "choice")[:-1] if choice else "" for choice in choices
    )
    return Question(subject, index, text, texts, _letter(row.get("answer")), line)


def _letter(answer: object) -> str:
    text = str(answer).strip().upper()
    if len(text) == 1 and text in "0123":
        return LETTERS[int(text)]
    if len(text) == 1 and text in LETTERS:
        return text
    raise ValueError(f"answer {str(answer)[:20]!r} must be A to D, or 0 to 3")


def _select_subjects(subjects: Sequence[str], available: Sequence[str]) -> list[str]:
    for subject in subjects:
        if subject not in available:
            raise InputError(f"subject {subject!r} not found{did_you_mean(subject, available)}")
    return sorted(set(subjects)) or sorted(available)


def _hub(split: str, subjects: Sequence[str], skipped: list[Skipped]) -> dict[str, list[Question]]:
    table = load_table(
        "cais/mmlu", split, splits=_HUB_SPLITS, instead="a folder of CSV files", name="all"
    )
    rows_of: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
    for line, row in enumerate(table, start=1):
        rows = rows_of.setdefault(str(row["subject"]), [])
        rows.append((line, len(rows), dict(row)))
    return {
        subject: _collect(rows_of[subject], subject, f"cais/mmlu {split}", skipped)
        for subject in _select_subjects(subjects, list(rows_of))
    }
