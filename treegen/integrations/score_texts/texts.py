"""Reads a file of texts to score, line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from treegen.common.files.read_errors import describe_read_error
from treegen.common.files.regular_files import open_regular
from treegen.errors import DataError, InputError
from treegen.prompts.plan.requests import ScoreInput
from treegen.runs.files import parse_json

_KEYS: Final = {"id", "text", "prompt", "completion"}


@dataclass(frozen=True, slots=True)
class InputText:
    """One line.

    id: its id, or the number of its line.
    where: the file and the number of the line.
    context: the text or token ids before the scored text.
    text: the text or token ids to score.
    seen: hash of the file up to the end of this line, as if a line break followed.
    """

    id: str
    where: str
    context: ScoreInput
    text: ScoreInput
    seen: str


def read_texts(path: Path) -> Iterator[InputText]:
    """Yield the texts of a file of JSON lines, each with `text`, or with `prompt` and `completion`.

    Their values are text or token ids. A line may have an `id`.

    Raises:
        InputError: The file cannot be read.
        DataError: A line has another form; the message has its number.
    """
    seen = hashlib.sha256()
    try:
        with open(open_regular(path), "rb") as file:
            for number, line in enumerate(file, 1):
                seen.update(line if line.endswith(b"\n") else line + b"\n")
                if line.strip():
                    yield _text_of(line, f"{path}:{number}", number, seen.hexdigest())
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from error


def _text_of(line: bytes, where: str, number: int, seen: str) -> InputText:
    try:
        row = parse_json(line.decode())
    except ValueError as error:
        raise DataError(f"{where} is no JSON ({error}); mend the line or take it out") from None
    if not isinstance(row, dict) or not (
        {"text"} <= row.keys() or {"prompt", "completion"} <= row.keys()
    ):
        raise DataError(f"{where} has no text, and no prompt with a completion; give one of them")
    if unknown := row.keys() - _KEYS:
        raise DataError(
            f"{where} has {', '.join(sorted(unknown))}, which is not known; a line has id, and "
            "text or prompt and completion"
        )
    if "text" in row and len(row.keys() & _KEYS - {"id"}) > 1:
        raise DataError(f"{where} has both text and prompt or completion; give one of them")
    text = _get_content(where, "text" if "text" in row else "completion", row)
    empty: ScoreInput = "" if isinstance(text, str) else []
    context = empty if "text" in row else _get_content(where, "prompt", row)
    if isinstance(context, str) != isinstance(text, str):
        raise DataError(f"{where}: give prompt and completion both as text or both as token ids")
    return InputText(_id_of(row.get("id", number), where), where, context, text, seen)


def _id_of(value: Any, where: str) -> str:
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{where}: id must be text in Unicode or a whole number, got {value!r:.60}")
    return value


def _get_content(where: str, name: str, row: dict[str, Any]) -> ScoreInput:
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        return value
    raise DataError(f"{where}: {name} must be text or a list of token ids, got {value!r:.60}")
