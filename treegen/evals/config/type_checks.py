"""Check that choices have the types of their fields, and settings their bounds."""

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final

from treegen.errors import InputError, arg


@dataclass(frozen=True, slots=True)
class Minimum:
    """The smallest number allowed for a value of the type Annotated[int, Minimum(1)]."""

    value: float


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest number allowed for a value of such a type."""

    value: float


Count = Annotated[int, Minimum(1)]
"""An integer from 1."""
_NAMES: Final[Mapping[Any, str]] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "True or False",
    types.NoneType: "None",
}
_PLURALS: Final = {"an integer": "integers", "a number": "numbers", "text": "texts"}


def check_choices(choices: Mapping[str, Any], *kinds: type) -> None:
    """Raise InputError for a choice whose value has none of the types of its field.

    Args:
        choices: The choices, by name.
        kinds: Dataclasses whose annotations define the types. As in JSON, a list is accepted for
            any sequence, and a mapping with the names of fields for a dataclass. Names that are not
            fields are not checked.
    """
    for kind in kinds:
        for name, value in choices.items():
            if (hint := _hints(kind).get(name)) is not None and not _is(value, hint):
                expected = " or ".join(dict.fromkeys(_describe_type(hint)))
                raise InputError(f"{arg(name)} must be {expected}, got {value!r:.60}")


def check_bounds(settings: object) -> None:
    """Raise InputError for a number outside the `Minimum` and `Maximum` of its field's type."""
    kind: type = type(settings)
    for name, bound in _bounds(kind):
        value = getattr(settings, name)
        if isinstance(bound, Minimum) and not value >= bound.value:  # true of NaN too
            raise InputError(f"{arg(name)} must be at least {bound.value}, got {value}")
        if isinstance(bound, Maximum) and not value <= bound.value:
            raise InputError(f"{arg(name)} must be at most {bound.value:,}, got {value}")


@cache
def _bounds(kind: type) -> list[tuple[str, Minimum | Maximum]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        (name, bound)
        for name, hint in hints.items()
        for bound in getattr(hint, "__metadata__", ())
        if isinstance(bound, Minimum | Maximum)
    ]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _is(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if origin in (tuple, Sequence):
        return isinstance(value, list | tuple) and all(
            _is(item_value, parts[0]) for item_value in value
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is(v, part) for item in value.items() for v, part in zip(item, parts, strict=True)
        )
    if is_dataclass(hint) and isinstance(value, Mapping):
        hints = _hints(typing.cast(type, hint))
        return all(name in hints and _is(v, hints[name]) for name, v in value.items())
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _describe_type(hint: Any) -> Iterator[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _describe_type(part)
    elif origin is typing.Literal:
        yield from map(repr, parts)
    elif origin in (tuple, Sequence):
        items = ", ".join(_describe_type(parts[0]))
        yield f"a list of {_PLURALS.get(items, items).removeprefix('a ')}"
    elif origin is Mapping:
        yield "a mapping of names to " + ", ".join(_describe_type(parts[1])).removeprefix("a ")
    elif is_dataclass(hint):
        yield "a mapping of " + ", ".join(_hints(typing.cast(type, hint)))
    else:
        yield _NAMES.get(hint, getattr(hint, "__name__", "something else"))
