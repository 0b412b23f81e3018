"""One record as one line of ASCII JSON whose last field is the CRC-32 of the line without it.

{"problem_id":"7","sample_index":0,"text":"18","crc":"9f3c01aa"}
"""

import json
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from treegen.errors import InputError, RunError
from treegen.runs.fields import check_record
from treegen.runs.files import check_id, parse_json, to_json_value

_MOST_SAMPLES: Final = 2**63
Key = tuple[str, int]
"""The key of a record: its problem_id and its sample_index."""

_encoder: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_CRC_START: Final = b',"crc":"'
# Start of a line whose id needs no escapes.
_USUAL: Final = re.compile(
    rb'\{"problem_id":"([ !#-\[\]-~]+)","sample_index":(0|[1-9][0-9]{0,17})[,}]'
)
# A text that no file can contain, because it is random for each process.
_BETWEEN: Final = secrets.token_hex(16)
_BETWEEN_LINES: Final = b',"%b",' % _BETWEEN.encode("ascii")


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Return `record` as one line with its crc and newline.

    Raises:
        InputError: JSON cannot represent it, or it has a field `crc`.
    """
    if "crc" in record:
        raise InputError("a record has the field 'crc', which the file adds itself")
    try:
        body = _encoder.encode(record).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        to_json_value(record, "record")  # raises an error that names the field
        raise InputError(f"a record cannot be written as JSON: {error}") from None
    return b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def decode_record(line: bytes) -> dict[str, Any]:
    """Check the crc of `line`; return its record without the crc.

    Raises:
        ValueError: the line is damaged, or a field has a wrong type.
    """
    return _check_record(parse_json(_parse_checked(line).decode("ascii")))


def decode_records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Return an iterator over `decode_record` of each line; it is faster than separate calls.

    Raises:
        ValueError: a line is damaged; it is raised when that line is reached.
    """
    try:
        values = parse_json(f"[{_BETWEEN_LINES.join(map(_parse_checked, lines)).decode('ascii')}]")
    except ValueError:
        values = []
    # The random text must separate all values, which proves that each line is one value.
    if len(values) == 2 * len(lines) - 1 and values[1::2] == [_BETWEEN] * (len(lines) - 1):
        return map(_check_record, values[::2])
    return map(decode_record, lines)


def _check_record(value: Any) -> dict[str, Any]:
    """Return a value as a checked record; raise ValueError if it is not one."""
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    key_of(value)
    record = _Record(value)
    check_record(record)
    if "usage" in record:
        record["usage"] = _Usage(record, record["usage"])
    return record


class _Record(dict[str, Any]):
    """A record as it is read; a missing field raises RunError, because it was removed by hand."""

    def __missing__(self, name: str) -> NoReturn:
        raise RunError(
            f"the record of problem {self['problem_id']!r:.80}, sample {self['sample_index']}, "
            f"lacks {name!r}; it was edited by hand: restore the file"
        )


class _Usage(dict[str, Any]):
    """The usage in a search's record; a missing number raises RunError too."""

    def __init__(self, record: _Record, numbers: Mapping[str, Any]) -> None:
        super().__init__(numbers)
        self._record = record

    def __missing__(self, name: str) -> NoReturn:
        self._record.__missing__(f"usage.{name}")


def decode_unchecked(line: bytes) -> dict[str, Any]:
    """Return the record of `line` without checking the types of its fields.

    Fields are checked when a record is read, not when its file is opened.

    Raises:
        ValueError: the line is damaged.
    """
    record = parse_json(_parse_checked(line).decode("ascii"))
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    key_of(record)
    return record


def _parse_checked(line: bytes) -> bytes:
    """Return the JSON of a line; raise ValueError if its crc is wrong."""
    head, _, crc = line.rpartition(_CRC_START)
    body = head + b"}"
    right = b'%08x"}\n' % zlib.crc32(body)
    if crc != right and crc != right[:-1]:
        raise ValueError("its crc is missing or wrong")
    return body


def read_key(line: bytes) -> Key:
    """Check the crc of a line and return its key; usual lines are not decoded any further.

    Raises:
        ValueError: the line is damaged.
    """
    usual = _USUAL.match(_parse_checked(line))
    if usual is None:
        return key_of(decode_unchecked(line))
    return usual[1].decode("ascii"), int(usual[2])


def key_of(record: Mapping[str, Any]) -> Key:
    """Return the key of `record`.

    Raises:
        InputError: it has no valid key.
    """
    problem_id, index = record.get("problem_id"), record.get("sample_index")
    if not isinstance(problem_id, str):
        raise InputError(f"problem_id must be text, got {problem_id!r}")
    if type(index) is not int or not 0 <= index < _MOST_SAMPLES:
        raise InputError(f"sample_index must be an integer from 0, below 2^63, got {index!r}")
    check_id(problem_id)
    return problem_id, index
