"""One record as one line of ASCII JSON whose last field is the CRC-32 of the line without it.

The types of fields are checked too, to detect files that were edited by hand.

{"problem_id":"7","sample_index":0,"text":"18","crc":"9f3c01aa"}
"""

import json
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

from treegen.errors import InputError, RunError
from treegen.runs.files import check_id, parse_json, to_json_value

_NONE: Final = type(None)
_TEXT: Final = (str, _NONE)
_WHOLE: Final = (int, _NONE)
_NUMBER: Final = (int, float)

Types = Mapping[str, tuple[type, ...]]


def _types(kinds_of: Mapping[str, tuple[type, ...]]) -> Types:
    """Return the types of each field of a table whose keys are names with spaces between."""
    return {name: kinds for names, kinds in kinds_of.items() for name in names.split()}


RECORD: Final = _types(
    {
        "text finish_reason answer error": _TEXT,
        "prompt_hash time method stopped": (str,),
        "seed num_tokens prompt_tokens choice_tokens dropped": (int,),
        "best": _WHOLE,
        "logprob self_certainty": (*_NUMBER, _NONE),
        "stop": (str, int, _NONE),
        "solved": (bool,),
        "thinking confidence": (dict, _NONE),
        "votes usage verdicts": (dict,),
        "tokens confidences choice_logprobs choice_greedy candidates nodes images": (list,),
    }
)
"""Types of the fields of records; further fields may have any type."""

_ELEMENTS: Final[Types] = {
    "confidence": (*_NUMBER, _NONE),
    "tokens": (int,),
    "confidences": (*_NUMBER, _NONE),
    "choice_logprobs": _NUMBER,
    "choice_greedy": (bool,),
    "candidates": (int,),
    "votes": _NUMBER,
    "usage": _NUMBER,
    "nodes": (dict,),
    "thinking": (int, bool, _NONE),
    "images": (str,),
    "verdicts": (dict,),
}
"""Types of the elements of these fields."""

_NODE: Final = _types(
    {
        "id depth n_tokens visits restart": (int,),
        "parent_id": _WHOLE,
        "text pruned_because finish_reason": _TEXT,
        "score logprob prior": (*_NUMBER, _NONE),
        "leaf pruned": (bool,),
        "scores": (dict,),
    }
)
_VERDICT: Final[Types] = {"answer": _TEXT, "correct": (bool,), "credit": (*_NUMBER, _NONE)}
_NESTED: Final[Mapping[str, Types]] = {"nodes": _NODE, "verdicts": _VERDICT}
"""Types of the fields of these elements."""
_MAX_INT: Final = 2**64

FREE: Final = _types(
    {
        "data split fewshot_file fewshot_data quantization revision speculate draft_model": _TEXT,
        "adapter chat_template verifier_memory source": _TEXT,
        "task model dtype kv_cache_dtype device sharing impl place stop_when reasoning": (str,),
        "num_fewshot page_size max_rows prefill_chunk draft_tokens": _WHOLE,
        "tensor_parallel_size concurrency stop_batch max_live": (int,),
        "compile run_ahead": (bool, _NONE),
        "eager reproducible check trust_remote_code score log_tokens": (bool,),
        "self_certainty images": (bool,),
        "memory limit": (str, *_NUMBER, _NONE),
        "ids pass_ks maj_ks": (list, _NONE),
        "votes pass_hat_ks": (list,),
        "extra sources verifier_args": (dict,),
        "confidence judged_by": (dict, _NONE),
    }
)
"""Types of free settings: those of the fields into which they are read."""

_FREE_ELEMENTS: Final[Types] = {
    "ids": (str,),
    "pass_ks": (int,),
    "maj_ks": (int,),
    "pass_hat_ks": (int,),
    "votes": (str,),
    "extra": (str,),
    "sources": (str,),
    "confidence": (int, float, _NONE),
}
_CONTAINERS: Final = (dict, list)


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of a record with a wrong type; see `check_types`."""
    # The records of a run mostly have the same fields and types as the last checked record.
    names, kinds = [*record], [*map(type, record.values())]
    known_names, known_kinds, integers = _last_checked[0]
    if names != known_names or kinds != known_kinds:
        integers = _integers_of(tuple(names), tuple(kinds))
        _last_checked[0] = names, kinds, integers
    if integers is None:
        return check_types(record, RECORD)
    for name in integers:
        if not -_MAX_INT < record[name] < _MAX_INT:
            raise _make_type_error(name, record[name], RECORD[name])


_last_checked: Final[list[tuple[list[str], list[type], tuple[str, ...] | None]]] = [([], [], None)]


@lru_cache(maxsize=64)
def _integers_of(names: tuple[str, ...], kinds: tuple[type, ...]) -> tuple[str, ...] | None:
    """Return the integer fields of a record, whose sizes are still to be checked.

    Return None if more must be checked: if a type is wrong, or a field is a list or a dict.
    """
    integers = []
    for name, kind in zip(names, kinds, strict=True):
        if (allowed := RECORD.get(name)) is not None:
            if kind not in allowed or kind in _CONTAINERS:
                return None
            if kind is int:
                integers.append(name)
    return tuple(integers)


def check_types(values: Mapping[str, Any], types: Types) -> None:
    """Raise ValueError for a value of a wrong type, or one that contains such a value.

    Integers may have at most 64 bits, as in tables that store them.
    """
    for name, value in values.items():
        kind = type(value)
        if (kinds := types.get(name)) is None:
            continue
        if kind not in kinds or (kind is int and not -_MAX_INT < value < _MAX_INT):
            raise _make_type_error(name, value, kinds)
        if kind in _CONTAINERS and (
            parts := (_ELEMENTS if types is RECORD else _FREE_ELEMENTS).get(name)
        ):
            for part in value.values() if kind is dict else value:
                if type(part) not in parts or (
                    type(part) is int and not -_MAX_INT < part < _MAX_INT
                ):
                    raise _make_type_error(f"an element of {name}", part, parts)
                if name in _NESTED:
                    check_types(part, _NESTED[name])


def _make_type_error(name: str, value: Any, kinds: tuple[type, ...]) -> ValueError:
    allowed = " or ".join("null" if kind is _NONE else kind.__name__ for kind in kinds)
    bits = " of at most 64 bits" if type(value) in kinds else ""
    return ValueError(f"{name} must be {allowed}{bits}, got {value!r:.60}")


_MAX_SAMPLES: Final = 2**63
Key = tuple[str, int]
"""The key of a record: its problem_id and its sample_index."""

_encoder: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_CRC_START: Final = b',"crc":"'
# Start of a line whose id needs no escapes.
_PLAIN_START: Final = re.compile(
    rb'\{"problem_id":"([ !#-\[\]-~]+)","sample_index":(0|[1-9][0-9]{0,17})[,}]'
)
# A text that no file can contain, because it is random for each process.
_SEPARATOR: Final = secrets.token_hex(16)
_SEPARATOR_ITEM: Final = b',"%b",' % _SEPARATOR.encode("ascii")


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Return `record` as one line with its crc and newline.

    Raises:
        InputError: JSON cannot represent it, or it has a field `crc`.
    """
    if "crc" in record:
        raise InputError(
            "a record must not contain the field 'crc', which is added when the record is written"
        )
    try:
        body = _encoder.encode(record).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        to_json_value(record, "record")  # raises an error that names the field
        raise InputError(f"a record cannot be written as JSON: {error}") from None
    return b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))


def decode_record(line: bytes) -> dict[str, Any]:
    """Check the crc of `line`; return its record without the crc.

    Raises:
        ValueError: the line is corrupt, or a field has a wrong type.
    """
    return _check_record(parse_json(_parse_checked(line).decode("ascii")))


def decode_records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Return an iterator over `decode_record` of each line; it is faster than separate calls.

    Raises:
        ValueError: a line is corrupt; it is raised when that line is reached.
    """
    try:
        values = parse_json(f"[{_SEPARATOR_ITEM.join(map(_parse_checked, lines)).decode('ascii')}]")
    except ValueError:
        values = []
    # The random text must separate all values, which proves that each line is one value.
    if len(values) == 2 * len(lines) - 1 and values[1::2] == [_SEPARATOR] * (len(lines) - 1):
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
        record["usage"] = _RecordPart(record, "usage", record["usage"])
    if "nodes" in record:
        record["nodes"] = [_RecordPart(record, "nodes", node) for node in record["nodes"]]
    return record


class _Record(dict[str, Any]):
    """A record as it is read; a missing field raises RunError, because it was removed by hand."""

    def __missing__(self, name: str) -> NoReturn:
        raise RunError(
            f"the record of problem {self['problem_id']!r:.80}, sample {self['sample_index']}, "
            f"has no {name!r}, because the file was edited by hand; restore the file from a copy"
        )


class _RecordPart(dict[str, Any]):
    """The usage or a node in a search's record; a missing field raises RunError too."""

    def __init__(self, record: _Record, name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._record, self._name = record, name

    def __missing__(self, name: str) -> NoReturn:
        self._record.__missing__(f"{self._name}.{name}")


def decode_unchecked(line: bytes) -> dict[str, Any]:
    """Return the record of `line` without checking the types of its fields.

    Fields are checked when a record is read, not when its file is opened.

    Raises:
        ValueError: the line is corrupt.
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
    """Check the crc of a line and return its key; lines with plain ids are not decoded.

    Raises:
        ValueError: the line is corrupt.
    """
    match = _PLAIN_START.match(_parse_checked(line))
    if match is None:
        return key_of(decode_unchecked(line))
    return match[1].decode("ascii"), int(match[2])


def key_of(record: Mapping[str, Any]) -> Key:
    """Return the key of `record`.

    Raises:
        InputError: it has no valid key.
    """
    problem_id, index = record.get("problem_id"), record.get("sample_index")
    if not isinstance(problem_id, str):
        raise InputError(f"problem_id must be text, got {problem_id!r}")
    if type(index) is not int or not 0 <= index < _MAX_SAMPLES:
        raise InputError(f"sample_index must be an integer from 0 to 2^63 - 1, got {index!r}")
    check_id(problem_id)
    return problem_id, index
