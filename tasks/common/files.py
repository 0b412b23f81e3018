"""Rows and columns of data files in all formats in which data sets are published.

Files are of unknown origin: every error names the file and the line.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import jsonlines

from treegen.common.files import (
    MAX_DATA_BYTES,
    NotRegularError,
    describe_read_error,
    max_unpacked_size,
    open_regular,
    read_bytes,
)
from treegen.errors import DataError

KINDS: Final = (".jsonl", ".csv", ".parquet")
"""Allowed endings of a split's file."""
_BOM: Final = b"\xef\xbb\xbf"

Rows = Iterable[tuple[int, dict[str, Any]]]
"""Rows with their line numbers, from 1; of several files, with a `RowNumber`."""


class RowNumber(int):
    """The number of a row of several files, and the row's place in one of these files."""

    file: str
    line: int

    def __new__(cls, number: int, file: Path, line: int) -> Self:
        """Create a number with the file and the line in the file, from 1."""
        self = super().__new__(cls, number)
        self.file, self.line = str(file), line
        return self


def find_place(number: int, source: str) -> tuple[str, int]:
    """Return the file and the line of a row's number; the file is `source` if there is only one."""
    return (number.file, number.line) if isinstance(number, RowNumber) else (source, number)


_BYTES_AT_ONCE: Final = 1 << 26  # bytes of a table's rows to read at once
_VALUE: Final = 8  # bytes to count for each value of a table
_BATCH: Final = 1024  # maximum rows of a table to read at once


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
    if not content or content.isspace():
        raise DataError(f"{source} is empty; write one JSON object on each line")
    # Read line by line: a list of many short lines would take many times the memory of the content.
    for number, line in enumerate(io.BytesIO(content.removeprefix(_BOM)), start=1):
        if line.strip():
            yield number, _parse(line, f"{source}, line {number}")


def read_data(path: Path) -> bytes:
    """Return the content of a data file; raise DataError if it cannot be read."""
    try:
        return read_bytes(path, MAX_DATA_BYTES)
    except OSError as error:
        raise DataError(describe_read_error(path, error)) from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        # By default jsonlines uses a faster decoder if one is installed, which accepts other JSON.
        row: dict[str, Any] = jsonlines.Reader([line], loads=_load).read(type=dict)
    except jsonlines.InvalidLineError as error:
        cause, advice = error.__cause__, "fix or remove the line"
        if isinstance(cause, UnicodeDecodeError):
            advice = "save the file as UTF-8"
        raise DataError(f"{where} {_describe_fault(cause)}; {advice}") from None
    except RecursionError:
        raise DataError(f"the JSON in {where} is nested too deeply; remove the line") from None
    return row


class _RepeatedNameError(ValueError):
    """Two fields of a JSON object have the same name."""


def _make_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    # The names are the same in every line, and take more memory than short texts.
    row = {sys.intern(name): value for name, value in fields}
    if len(row) < len(fields) and (name := _find_repeated(name for name, _ in fields)):
        raise _RepeatedNameError(f"has two fields named {name!r:.80}")
    return row


_load: Final = partial(json.loads, object_pairs_hook=_make_object)


def _find_repeated(names: Iterable[str]) -> str | None:
    """Return a name that occurs twice; None without one. Spreadsheets write unnamed columns."""
    return next((name for name, num in Counter(names).items() if num > 1 and name.strip()), None)


def _check_columns(names: Iterable[str], path: Path) -> None:
    if name := _find_repeated(names):
        raise DataError(f"{path} has two columns named {name!r:.80}; rename or remove one of them")


def _describe_fault(cause: BaseException | None) -> str:
    match cause:
        case None:
            return "is not a JSON object"
        case _RepeatedNameError():
            return str(cause)
        case UnicodeDecodeError():
            return "is not UTF-8"
        case json.JSONDecodeError():
            column = min(cause.pos, len(cause.doc.rstrip())) + 1  # an end of line is not a line
            return f"is not JSON: {cause.msg} at column {column}"
        case _:  # such as a number of thousands of digits
            return "is JSON that could not be read"


def text_field(row: Mapping[str, Any], name: str) -> str:
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
        raise ValueError(
            f"{name} contains half of a surrogate pair, which is not valid text"
        ) from None
    return value


def read_any(path: Path) -> Rows:
    """Return the rows of a file, whose ending decides its format.

    The endings `.csv` (with a header) and `.parquet` are known. Any other file is JSON Lines or a
    JSON list, compressed by gzip if it ends in `.gz`.

    Raises:
        DataError: The file cannot be read, or has another format.
    """
    if path.suffix == ".csv":
        return csv_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return parse_content(read_data(path), str(path))


def parse_content(content: bytes, source: str) -> Rows:
    """Return the rows in the bytes of a JSON file. `source` is the file's name."""
    if source.endswith(".gz"):
        content = _decompress(content, source)
    if not content.removeprefix(_BOM).lstrip().startswith(b"["):
        return parse_rows(content, source)
    try:
        value = _load(content.removeprefix(_BOM))
    except _RepeatedNameError as error:
        raise DataError(f"an object in {source} {error}; rename or remove one of them") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{source} is not a JSON list: {error}; "
            "begin each line with an object, or close the list"
        ) from None
    if not value or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{source} is not a list of JSON objects; write one object per row")
    return list(enumerate(value, start=1))


def _decompress(content: bytes, source: str) -> bytes:
    max_bytes = max_unpacked_size(len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{source} is not a gzip file: {error}; unpack or rename the file"
        ) from None
    if len(unpacked) > max_bytes:
        raise DataError(
            f"{source} unpacks to more than {max_bytes >> 20:,} MiB, which is unusual for its "
            "size; if you trust the file, unpack it with gunzip and pass the unpacked file"
        )
    return unpacked


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8 with its line ends unchanged.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    try:
        return read_data(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(_describe_other_encoding(path)) from None


def _describe_other_encoding(path: Path) -> str:
    return f"{path} is not UTF-8; save the file as UTF-8"


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) for every row of a CSV file with a header.

    Default ids are made of line numbers: those of csv.DictReader, which after an empty line are the
    number of that line.

    Raises:
        DataError: The file cannot be read, two columns have the same name, or a row has more cells
            than the header.
    """

    def read(lines: Iterable[str]) -> Iterable[dict[Any, Any]]:
        reader = csv.DictReader(lines)
        _check_columns(reader.fieldnames or (), path)
        return reader

    for line, row in _number_lines(path, read, 2):
        if any(cell.strip() for cell in row.pop(None, ())):
            raise DataError(
                f"{path}, line {line} has more cells than the header; put quotes around each cell "
                "that contains a comma"
            )
        yield line, row


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number from 1, cells) for every line of a CSV file that is not empty."""
    return _number_lines(path, csv.reader, 1)


def _number_lines(path: Path, read: Callable[[Iterable[str]], Any], start: int) -> Iterator[Any]:
    # Decode piece by piece: the whole text would take up to four times the memory of the content.
    text = io.TextIOWrapper(io.BytesIO(read_data(path)), encoding="utf-8-sig", newline="")
    try:
        reader = read(text)
        for row in reader:
            if row:
                yield start, row
            start = reader.line_num + 1
    except UnicodeDecodeError:
        raise DataError(_describe_other_encoding(path)) from None
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start}: {error}; fix the line, or save the rows as JSON Lines"
        ) from None


def _parquet_rows(path: Path) -> Rows:
    try:
        # pyarrow is installed with datasets and is slow to import.
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{path} needs the package pyarrow; install it with: pip install pyarrow"
        ) from None
    table: list[dict[str, Any]] = []
    try:
        max_bytes = max_unpacked_size(path.stat().st_size)
        with open(open_regular(path), "rb") as stream, parquet.ParquetFile(stream) as file:
            names = file.schema_arrow.names
            groups = [file.metadata.row_group(at) for at in range(file.num_row_groups)]
            columns = [group.column(at) for group in groups for at in range(group.num_columns)]
            size = _VALUE * sum(column.num_values for column in columns)
            # One long value may occur in every row.
            longest = max((column.total_uncompressed_size for column in columns), default=0)
            rows = min(max(_BYTES_AT_ONCE // max(longest, 1), 1), _BATCH)
            batches = file.iter_batches(batch_size=rows)
            while size <= max_bytes and (batch := next(batches, None)) is not None:
                table += batch.to_pylist()
                size += _length(table[-batch.num_rows :])
    except NotRegularError as error:
        raise DataError(describe_read_error(path, error)) from None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path} could not be read: {reason}; write the Parquet file again"
        ) from None
    _check_columns(names, path)
    if size > max_bytes:
        raise DataError(
            f"{path} unpacks to more than {max_bytes >> 20:,} MiB, which is unusual for its size; "
            "if you trust the file, save its rows as JSON Lines and pass the new file"
        )
    return enumerate(table, start=1)


def _length(value: object) -> int:
    """Return the number of characters and bytes in a value, including nested ones."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    return sum(map(_length, value)) if isinstance(value, list) else 0


def column(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text of the first column in `names` that a row has, ignoring case.

    Raises:
        ValueError: The row has none of these columns or two of the same name, or the value is blank
            or not text.
    """
    for name in names:
        found = {
            key: value
            for key, value in row.items()
            if value is not None and key.strip().casefold() == name.casefold()
        }
        if len(found) > 1:
            raise ValueError(
                f"the columns {' and '.join(map(repr, found))} differ only in case or spaces"
            )
        if found:
            (value,) = found.values()
            if isinstance(value, int) and not isinstance(value, bool):
                value = str(value)
            return text_field({name: value}, name)
    raise ValueError(
        f"no {' or '.join(names)}; the row has {', '.join(map(str, row)) or 'no columns'}"
    )


def optional(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the text of the first column in `names` that a row has; None without a usable one."""
    try:
        return column(row, names)
    except ValueError:
        return None
