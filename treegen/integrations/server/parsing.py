"""Parses JSON objects into models, with errors that name the field and suggest a known one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from treegen.common.spelling import advise_foreign, did_you_mean
from treegen.integrations.server.node_params import Sampling
from treegen.integrations.server.node_types import Operation
from treegen.integrations.server.requests import RequestError

_Model = TypeVar("_Model", bound=BaseModel)
_TYPES: Final = frozenset({"str", "int", "float", "bool", "dict", "list"})
_OPERATIONS: Final[dict[str, type[BaseModel]]] = {
    get_args(model.model_fields["op"].annotation)[0]: model
    for model in get_args(get_args(Operation)[0])
}


def parse_model(kind: type[_Model], fields: Any, name: str = "") -> _Model:
    """Return a JSON object as its model.

    Args:
        kind: The model.
        fields: The JSON object.
        name: Name of the object in the request. Default: it is the body.

    Raises:
        RequestError: A field is unknown or malformed.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first, *more_errors = error.errors(include_url=False, include_input=False)
        param = _name_field(first["loc"], name)
        if first["type"].endswith("_type"):  # another member of a union may fit better
            for other in more_errors:
                if _name_field(other["loc"], name) == param and not other["type"].endswith("_type"):
                    first = other
                    break
        if first["type"] == "extra_forbidden":
            message = f"{param or 'the body'} is not supported{_hint(kind, first['loc'])}"
        elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
            tag = first["ctx"].get("tag", "")[:80]
            names = did_you_mean(tag, _OPERATIONS) or f"; use one of {', '.join(_OPERATIONS)}"
            message = f"{param}: the op {tag!r} is not supported{names}"
        else:
            message = f"{param or 'body'}: {first['msg']}"
        raise RequestError(message, param) from None


def _name_field(place: Sequence[Any], name: str) -> str | None:
    """Return the name of a field in a request; None for the body.

    Args:
        place: The names and indices that lead to the field, as pydantic reports them.
        name: Name of the outermost object in the request; empty for the body.
    """
    where: list[str] = [name] if name else []
    for part in map(str, place):
        if not part.replace("_", "").isalnum() or part in _TYPES:
            break  # a member of a union
        if not (len(where) == 2 and where[0] == "operations" and part in _OPERATIONS):
            where.append(part[:80])
    return ".".join(where) or None


def _hint(kind: type[BaseModel], place: Sequence[Any]) -> str:
    """Return what to do about an unknown field.

    Args:
        kind: The model of the body.
        place: The names and indices that lead to the field, as pydantic reports them.
    """
    *above, name = map(str, place)
    outer = _OPERATIONS[above[2]] if above[:1] == ["operations"] and above[2:] else kind
    known = outer.model_fields.keys()
    if above[-1:] == ["params"]:
        if name in known:
            return "; pass it outside params"
        known = Sampling.model_fields.keys()
    elif "params" in known and name in Sampling.model_fields:
        return "; pass it in params"
    ours, _ = advise_foreign(name, known)
    if ours is not None:
        return f"; did you mean {ours!r}?"
    return did_you_mean(name[:80], known) or "; remove it"
