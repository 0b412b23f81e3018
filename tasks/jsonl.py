"""Reading JSON Lines that other people wrote: every fault is named by file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treegen.errors import DataError

_BOM = b"\xef\xbb\xbf"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Yield (line number from 1, object) for every line that is not blank.

    Lines end at \n alone: a text may hold U+2028 and its like, where `splitlines` would cut.
    """
    return parse_rows(_read(path), str(path))


def parse_rows(content: bytes, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of JSON Lines held in memory."""
    if not content.strip():
        raise DataError(f"{source} is empty")
    for number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            yield number, _parse(line, source, number)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _parse(line: bytes, source: str, number: int) -> dict[str, Any]:
    where = f"{source}, line {number}"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):
        # A number of thousands of digits, or brackets nested as deep.
        raise DataError(f"{where} is JSON beyond what can be read") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object")
    return row


def text_field(row: dict[str, Any], name: str) -> str:
    """Return a text of a row; ValueError with the reason if there is none to use."""
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
