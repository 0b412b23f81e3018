"""Types of the fields in run directories, to detect files that were edited by hand."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

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

_PARTS: Final[Types] = {
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
_MOST: Final = 2**64

FREE: Final = _types(
    {
        "data split fewshot_file fewshot_data quantization revision speculate draft_model": _TEXT,
        "adapter chat_template verifier_memory source": _TEXT,
        "task model dtype kv_cache_dtype device sharing impl place stop_when reasoning": (str,),
        "num_fewshot page_size max_rows prefill_chunk draft_tokens": _WHOLE,
        "tensor_parallel_size concurrency stop_batch": (int,),
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

_FREE_PARTS: Final[Types] = {
    "ids": (str,),
    "pass_ks": (int,),
    "maj_ks": (int,),
    "pass_hat_ks": (int,),
    "votes": (str,),
    "extra": (str,),
    "sources": (str,),
    "confidence": (int, float, _NONE),
}
_HOLDERS: Final = (dict, list)


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of a record with a wrong type; see `check_types`."""
    # The records of a run mostly have the same fields and types as the last checked record.
    names, kinds = [*record], [*map(type, record.values())]
    known_names, known_kinds, whole = _last[0]
    if names != known_names or kinds != known_kinds:
        whole = _whole_of(tuple(names), tuple(kinds))
        _last[0] = names, kinds, whole
    if whole is None:
        return check_types(record, RECORD)
    for name in whole:
        if not -_MOST < record[name] < _MOST:
            raise _wrong(name, record[name], RECORD[name])


_last: Final[list[tuple[list[str], list[type], tuple[str, ...] | None]]] = [([], [], None)]


@lru_cache(maxsize=64)
def _whole_of(names: tuple[str, ...], kinds: tuple[type, ...]) -> tuple[str, ...] | None:
    """Return the integer fields of a record, whose sizes are still to be checked.

    Return None if more must be checked: if a type is wrong, or a field is a list or a dict.
    """
    integers = []
    for name, kind in zip(names, kinds, strict=True):
        if (known := RECORD.get(name)) is not None:
            if kind not in known or kind in _HOLDERS:
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
        if kind not in kinds or (kind is int and not -_MOST < value < _MOST):
            raise _wrong(name, value, kinds)
        if kind in _HOLDERS and (parts := (_PARTS if types is RECORD else _FREE_PARTS).get(name)):
            for part in value.values() if kind is dict else value:
                if type(part) not in parts or (type(part) is int and not -_MOST < part < _MOST):
                    raise _wrong(f"a part of {name}", part, parts)
                if name in _NESTED:
                    check_types(part, _NESTED[name])


def _wrong(name: str, value: Any, kinds: tuple[type, ...]) -> ValueError:
    known = " or ".join("null" if kind is _NONE else kind.__name__ for kind in kinds)
    bits = " of at most 64 bits" if type(value) in kinds else ""
    return ValueError(f"{name} is {value!r:.60}, and must be {known}{bits}")
