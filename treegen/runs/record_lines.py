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
"""The name of a record: its problem_id and its sample_index."""

_encoder: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_CRC_START: Final = b',"crc":"'
# How lines begin whose id needs no escapes.
_USUAL: Final = re.compile(
    rb'\{"problem_id":"([ !#-\[\]-~]+)","sample_index":(0|[1-9][0-9]{0,17})[,}]'
)
# A text that no file can have, as it is drawn for each process.
_BETWEEN: Final = secrets.token_hex(16)
_BETWEEN_LINES: Final = b',"%b",' % _BETWEEN.encode("ascii")


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Return `record` as one line with its crc and newline.

    Raises:
        InputError: JSON cannot hold it, or it has a field `crc`.
    """
    if "crc" in record:
        raise InputError("a record has the field 'crc', which the file adds itself")
    try:
        body = _encoder.encode(record).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        to_json_value(record, "record")  # says which field it is
        raise InputError(f"a record cannot be written as JSON: {error}") from None
    return b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def decode_record(line: bytes) -> dict[str, Any]:
    """Return the record of `line`, its crc checked and taken out.

    Raises:
        ValueError: the line is bad, or a field is of a wrong type.
    """
    return _check_record(parse_json(_parse_checked(line).decode("ascii")))


def decode_records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Return what `decode_record` does of each line, in less time.

    Raises:
        ValueError: a line is bad; it is raised when that line is reached.
    """
    try:
        found = parse_json(f"[{_BETWEEN_LINES.join(map(_parse_checked, lines)).decode('ascii')}]")
    except ValueError:
        found = []
    # What no line has stands between any two values, so each line is one value.
    if len(found) == 2 * len(lines) - 1 and found[1::2] == [_BETWEEN] * (len(lines) - 1):
        return map(_check_record, found[::2])
    return map(decode_record, lines)


def _check_record(value: Any) -> dict[str, Any]:
    """Return the record that a value is; raises ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    key_of(value)
    record = _Record(value)
    check_record(record)
    if "usage" in record:
        record["usage"] = _Usage(record, record["usage"])
    return record


class _Record(dict[str, Any]):
    """A record as it is read, which may lack what its kind has if it was edited by hand."""

    def __missing__(self, name: str) -> NoReturn:
        raise RunError(
            f"the record of problem {self['problem_id']!r:.80}, sample {self['sample_index']}, "
            f"lacks {name!r}; it was edited by hand: restore the file"
        )


class _Usage(dict[str, Any]):
    """What a search took, as its record has it, which may lack a number likewise."""

    def __init__(self, record: _Record, numbers: Mapping[str, Any]) -> None:
        super().__init__(numbers)
        self._record = record

    def __missing__(self, name: str) -> NoReturn:
        self._record.__missing__(f"usage.{name}")


def decode_unchecked(line: bytes) -> dict[str, Any]:
    """Return the record of `line`; its fields are checked when it is read, not when it is opened.

    Raises:
        ValueError: the line is bad.
    """
    record = parse_json(_parse_checked(line).decode("ascii"))
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    key_of(record)
    return record


def _parse_checked(line: bytes) -> bytes:
    """Return the JSON of a line; raises ValueError if its crc is not right."""
    head, _, crc = line.rpartition(_CRC_START)
    body = head + b"}"
    right = b'%08x"}\n' % zlib.crc32(body)
    if crc != right and crc != right[:-1]:
        raise ValueError("its crc is missing or wrong")
    return body


def read_key(line: bytes) -> Key:
    """Return the key of a line whose crc is right, without decoding the rest if it is usual.

    Raises:
        ValueError: the line is bad.
    """
    usual = _USUAL.match(_parse_checked(line))
    if usual is None:
        return key_of(decode_unchecked(line))
    return usual[1].decode("ascii"), int(usual[2])


def key_of(record: Mapping[str, Any]) -> Key:
    """Return the key of `record`.

    Raises:
        InputError: it has none.
    """
    problem_id, index = record.get("problem_id"), record.get("sample_index")
    if not isinstance(problem_id, str):
        raise InputError(f"problem_id must be text, got {problem_id!r}")
    if type(index) is not int or not 0 <= index < _MOST_SAMPLES:
        raise InputError(f"sample_index must be an integer from 0, below 2^63, got {index!r}")
    check_id(problem_id)
    return problem_id, index
