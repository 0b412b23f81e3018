"""Reads JSON Lines of unknown origin; every error names the file and the line."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonlines

from treegen.common.files import describe_read_error, read_bytes
from treegen.errors import DataError

_BOM = b"\xef\xbb\xbf"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Yield (line number from 1, object) for every line that is not blank.

    Only \n ends a line. `splitlines` would also split at U+2028 and similar characters in texts.
    """
    return parse_rows(read_data(path), str(path))


def parse_rows(content: bytes, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of JSON Lines in memory.

    Raises:
        DataError: There are no rows, or a line is not a JSON object.
    """
    if not content.strip():
        raise DataError(f"{source} is empty; write one JSON object in each line")
    # Read line by line: a list of many short lines would take many times the memory of the content.
    for number, line in enumerate(io.BytesIO(content.removeprefix(_BOM)), start=1):
        if line.strip():
            yield number, _parse(line, f"{source}, line {number}")


def read_data(path: Path) -> bytes:
    """Return the content of a data file; raise DataError if it cannot be read."""
    try:
        return read_bytes(path)
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        # By default jsonlines uses a faster decoder if one is installed, which accepts other JSON.
        row: dict[str, Any] = jsonlines.Reader([line], loads=json.loads).read(type=dict)
    except jsonlines.InvalidLineError as error:
        raise DataError(f"{where} {_fault(error.__cause__)}; mend or remove the line") from None
    except RecursionError:
        raise DataError(f"{where} is JSON nested too deeply; remove the line") from None
    return row


def _fault(cause: BaseException | None) -> str:
    match cause:
        case None:
            return "is not a JSON object"
        case UnicodeDecodeError():
            return "is not UTF-8"
        case json.JSONDecodeError():
            column = min(cause.pos, len(cause.doc.rstrip())) + 1  # an end of line is not a line
            return f"is not JSON: {cause.msg} at column {column}"
        case _:  # such as a number of thousands of digits
            return "is JSON beyond what can be read"


def text_field(row: dict[str, Any], name: str) -> str:
    """Return a text field of a row.

    Raises:
        ValueError: The field is missing, blank or not text, or has half of a surrogate pair.
    """
    value = row.get(name)
    if value is None:
        raise ValueError(f"no {name}")
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no text") from None
    return value
