"""Types of the fields in run directories, to detect files that were edited by hand."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

_NONE: Final = type(None)
_TEXT: Final = (str, _NONE)
_WHOLE: Final = (int, _NONE)
_TRUTH: Final = (bool, _NONE)
_NUMBER: Final = (int, float)

Types = Mapping[str, tuple[type, ...]]

RECORD: Final[Types] = {
    "text": _TEXT,
    "seed": (int,),
    "num_tokens": (int,),
    "prompt_tokens": (int,),
    "logprob": (*_NUMBER, _NONE),
    "finish_reason": _TEXT,
    "stop": (str, int, _NONE),
    "prompt_hash": (str,),
    "time": (str,),
    "thinking": (dict, _NONE),
    "dropped": (int,),
    "confidence": (dict, _NONE),
    "self_certainty": (*_NUMBER, _NONE),
    "tokens": (list,),
    "confidences": (list,),
    "choice_logprobs": (list,),
    "choice_tokens": (int,),
    "method": (str,),
    "choice_greedy": (list,),
    "solved": (bool,),
    "answer": _TEXT,
    "best": _WHOLE,
    "candidates": (list,),
    "votes": (dict,),
    "stopped": (str,),
    "error": _TEXT,
    "usage": (dict,),
    "nodes": (list,),
    "images": (list,),
    "verdicts": (dict,),
}
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

_NODE: Final[Types] = {
    "id": (int,),
    "parent_id": _WHOLE,
    "depth": (int,),
    "text": _TEXT,
    "n_tokens": (int,),
    "score": (*_NUMBER, _NONE),
    "logprob": (*_NUMBER, _NONE),
    "prior": (*_NUMBER, _NONE),
    "leaf": (bool,),
    "pruned": (bool,),
    "pruned_because": _TEXT,
    "finish_reason": _TEXT,
    "visits": (int,),
    "restart": (int,),
    "scores": (dict,),
}
_VERDICT: Final[Types] = {"answer": _TEXT, "correct": (bool,), "credit": (*_NUMBER, _NONE)}
_NESTED: Final[Mapping[str, Types]] = {"nodes": _NODE, "verdicts": _VERDICT}
"""Types of the fields of these elements."""
_MOST: Final = 2**64

FREE: Final[Types] = {
    **dict.fromkeys(
        (
            "data",
            "split",
            "fewshot_file",
            "fewshot_data",
            "quantization",
            "revision",
            "speculate",
            "draft_model",
            "adapter",
            "chat_template",
            "verifier_memory",
            "source",
        ),
        _TEXT,
    ),
    **dict.fromkeys(
        (
            "task",
            "model",
            "dtype",
            "kv_cache_dtype",
            "device",
            "sharing",
            "impl",
            "place",
            "stop_when",
            "reasoning",
        ),
        (str,),
    ),
    **dict.fromkeys(
        ("num_fewshot", "page_size", "max_rows", "prefill_chunk", "draft_tokens"), _WHOLE
    ),
    **dict.fromkeys(("tensor_parallel_size", "concurrency", "stop_batch"), (int,)),
    **dict.fromkeys(("compile", "run_ahead"), _TRUTH),
    **dict.fromkeys(
        (
            "eager",
            "reproducible",
            "check",
            "trust_remote_code",
            "score",
            "log_tokens",
            "self_certainty",
            "images",
        ),
        (bool,),
    ),
    **dict.fromkeys(("memory", "limit"), (str, *_NUMBER, _NONE)),
    **dict.fromkeys(("ids", "pass_ks", "maj_ks"), (list, _NONE)),
    "votes": (list,),
    **dict.fromkeys(("extra", "sources", "verifier_args"), (dict,)),
    **dict.fromkeys(("confidence", "judged_by"), (dict, _NONE)),
}
"""Types of free settings: those of the fields into which they are read."""

_FREE_PARTS: Final[Types] = {
    "ids": (str,),
    "pass_ks": (int,),
    "maj_ks": (int,),
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
    found = []
    for name, kind in zip(names, kinds, strict=True):
        if (known := RECORD.get(name)) is not None:
            if kind not in known or kind in _HOLDERS:
                return None
            if kind is int:
                found.append(name)
    return tuple(found)


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
