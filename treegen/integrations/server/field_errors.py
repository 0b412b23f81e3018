"""What is wrong with a field of a request, in the words of the other errors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from treegen.common.foreign_names import REQUEST_ADVICE, advise_foreign
from treegen.common.spelling import did_you_mean
from treegen.errors import Message

_TYPES: Final = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "mapping": "an object",
    "model": "an object",
    "string": "a string",
    "tuple": "a list",
}
"""JSON's names of the types in pydantic's kinds of errors, such as `int_type`."""
_MEMBERS: Final = frozenset({"str", "int", "float", "bool", "dict", "list"})
"""Names of the members of a union where pydantic reports the location of an error."""
_LIMITS: Final[dict[str, tuple[str, str, str]]] = {
    "greater_than": ("be more than", "gt", ""),
    "greater_than_equal": ("be at least", "ge", ""),
    "less_than": ("be less than", "lt", ""),
    "less_than_equal": ("be at most", "le", ""),
    "too_short": ("have at least", "min_length", " item"),
    "too_long": ("have at most", "max_length", " item"),
    "string_too_short": ("have at least", "min_length", " character"),
    "string_too_long": ("have at most", "max_length", " character"),
}
"""pydantic's kinds of errors, with the relation to a limit, the limit's name, and its unit."""
_FIELD_ADVICE: Final = {
    "best_of": "use n",
    "cache_salt": "remove it: all clients of the server share the cached prefixes of prompts",
    "chat_template": "start treegen serve with --chat-template TEMPLATE, because a request cannot "
    "contain a template",
    "documents": 'pass chat_template_kwargs={"documents": [...]}',
    "function_call": "use tool_choice",
    "functions": "use tools",
    "max_completion_tokens": "use max_tokens",
    "reasoning_effort": "pass the effort to the chat template: "
    'chat_template_kwargs={"reasoning_effort": "low"}, or {"reasoning": "low"} '
    "if the template uses that name",
    "stream": "remove it: of the requests for nodes, only POST /v1/nodes/ID/sample can stream",
    "top_logprobs": "use logprobs",
    "use_beam_search": "POST chats to /v1/search/beam/chat/completions for a beam search",
}
"""Fields of other servers, and what to do instead. `treegen.common.spelling` has the parameters of
other libraries."""


_MAX_ERRORS: Final = 10_000  # errors of a body to read: a million takes several seconds


def hint_field(name: str, known: Iterable[str]) -> str:
    """Return "; " and what to do about a field that a request cannot have.

    Args:
        name: The field.
        known: The fields that the request can have.
    """
    known = list(known)
    own_name, advice = advise_foreign(name, known)
    advice = Message({**REQUEST_ADVICE, **_FIELD_ADVICE}.get(name, advice))
    if advice:
        _, _, without_reason = advice.partition(" not supported; ")
        return f"; {without_reason or advice}".replace("remove this argument", "remove it")
    if own_name is not None:
        return f"; did you mean {own_name!r}?"
    return did_you_mean(name[:80], known) or "; remove it"


def describe_field_error(
    error: ValidationError, name: str = "", operations: Container[str] = ()
) -> tuple[str, str | None, Mapping[str, Any]]:
    """Return what is wrong with a body, the name of the field, and pydantic's details.

    Args:
        error: The error.
        name: Name of the outermost object in the request. Default: it is the body.
        operations: Names of operations, which pydantic puts into the locations of errors.
    """
    if (num := error.error_count()) > _MAX_ERRORS:
        message = f"{name or 'the body'} has {num:,} values or fields that are not supported"
        return f"{message}; compare it with GET /openapi.json", None, {"type": "", "loc": ()}
    errors: Sequence[Mapping[str, Any]] = error.errors(include_url=False)
    param = name_field(errors[0]["loc"], name, operations)
    same = [one for one in errors if name_field(one["loc"], name, operations) == param]
    # The value fits the type of at most one member of a union, and that error says most.
    fitting = [one for one in same if not _is_type_error(one)]
    first = fitting[0] if fitting else same[0]
    field = param or "the body"
    loc = [str(part)[:80] for part in first["loc"] if part not in _MEMBERS]
    if loc and loc[-1] == "[key]":
        holder = field.removesuffix(f".{loc[-2]}")
        return (
            f"the key {loc[-2]!r} of {holder} must {_describe_requirement([first])}",
            param,
            first,
        )
    if first["type"] == "missing":
        return f"{field} is missing; add {field}", param, first
    if first["type"] == "extra_forbidden":
        return f"{field} is not supported; remove it", param, first
    if requirement := _describe_requirement(fitting[:1] or same):
        return f"{field} must {requirement}{_describe_value(first['input'])}", param, first
    return f"{field} cannot be used: {first['msg']}; change or remove it", param, first


def name_field(loc: Sequence[Any], name: str = "", operations: Container[str] = ()) -> str | None:
    """Return the name of a field in a request; None for the body.

    Args:
        loc: The names and indices that lead to the field, as pydantic reports them.
        name: Name of the outermost object in the request. Default: it is the body.
        operations: As for `describe_field_error`.
    """
    names: list[str] = [name] if name else []
    for part in map(str, loc):
        if not part.replace("_", "").isalnum() or part in _MEMBERS:
            break  # a member of a union
        if not (len(names) == 2 and names[0] == "operations" and part in operations):
            names.append(part[:80])
    return ".".join(names) or None


def _is_type_error(error: Mapping[str, Any]) -> bool:
    """Return whether a value has the wrong type, or is none of a few, and not the wrong size."""
    kind, _, rest = error["type"].partition("_")
    is_type = kind in _TYPES and rest in ("type", "parsing", "from_float")
    return is_type or error["type"] == "literal_error"


def _describe_requirement(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return what a value must be or have, such as "be a list"; "" for other kinds of errors.

    Args:
        errors: An error about the value, or one for each type that the value may have.
    """
    kind, details = errors[0]["type"], errors[0].get("ctx", {})
    if kind in _LIMITS:
        relation, name, unit = _LIMITS[kind]
        limit = details[name]
        number = f"{int(limit) if limit == int(limit) else limit:,}"
        return f"{relation} {number}{unit}{'s' if unit and limit != 1 else ''}"
    if not all(map(_is_type_error, errors)):
        return ""
    names = [
        error["ctx"]["expected"]
        if error["type"] == "literal_error"
        else _TYPES[error["type"].partition("_")[0]]
        for error in errors
    ]
    if len(set(names)) > 1:
        names = ["a boolean" if name == _TYPES["bool"] else name for name in dict.fromkeys(names)]
        return f"be {', '.join(names[:-1])} or {names[-1]}"
    return f"be {names[0]}"


def _describe_value(value: object) -> str:
    """Return ", got VALUE" for a value of a request, in JSON's terms."""
    if isinstance(value, bool):
        return f", got {str(value).lower()}"
    if isinstance(value, str):
        return f", got {value[:60]!r}"
    if isinstance(value, Mapping):
        return ", got an object"
    if isinstance(value, list | tuple):
        return f", got a list of {len(value):,}" if value else ", got an empty list"
    return f", got {value!r:.60}"
