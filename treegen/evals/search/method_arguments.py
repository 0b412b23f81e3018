"""Arguments of a function, read from text by the types in its signature."""

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from treegen.errors import InputError
from treegen.evals.arguments import TRUTHS
from treegen.evals.config.type_checks import Count as Count
from treegen.evals.config.type_checks import Minimum

REQUIRED: Final = inspect.Parameter.empty


_TYPES: Final = "int, float, str, bool, Literal, X | None or tuple[X, ...]"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a user can give by name."""

    name: str
    kind: Any
    """Its type."""
    default: Any = REQUIRED
    """REQUIRED if it has none."""


def read_signature(
    function: Callable[..., Any], label: str = "the function", filled: Sequence[str] = ()
) -> tuple[Argument, ...]:
    """Return the arguments of a function except its first one.

    Args:
        function: The function; its first parameter is the root node.
        label: The function's name in messages.
        filled: Names of parameters that the caller fills.

    Raises:
        InputError: the function takes no first argument, or has one that cannot be parsed from
            text.
    """
    try:
        first, *others = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(f"{label} takes no argument; give it one for the root node") from None
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise InputError(f"{label} takes no argument by place; make its first one the root node")
    arguments = []
    for parameter in others:
        if parameter.name in filled or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(
                f"{label} takes {parameter.name} by place alone; remove the / behind it"
            )
        arguments.append(
            Argument(parameter.name, _kind(parameter, function, label), parameter.default)
        )
    return tuple(arguments)


def read_values(
    arguments: Sequence[Argument], texts: Mapping[str, Any], label: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of all arguments that JSON can hold, defaults included.

    Args:
        arguments: The arguments of the function.
        texts: Texts, or values that were parsed before, by name.
        label: The function's name in messages.
        also: Further names that `texts` may have; they are left out.

    Raises:
        InputError: a name is not known, a value has another type, or one is missing.
    """
    # It is slow to import, and help does not need it.
    from treegen.common.spelling import did_you_mean, hints_at

    names = [argument.name for argument in arguments]
    if unknown := [name for name in texts if name not in names and name not in also]:
        takes = f"; it takes {', '.join(names)}" if names else "; it takes none"
        hints = hints_at(unknown, lambda name: did_you_mean(name, names), takes)
        raise InputError(f"{label} has no argument {' and no '.join(map(repr, unknown))}{hints}")
    values = {}
    for argument in arguments:
        if argument.name in texts:
            values[argument.name] = _read(
                argument.kind, texts[argument.name], f"{label}: {argument.name}"
            )
        elif argument.default is REQUIRED:
            raise InputError(f"{label} needs {argument.name}; give it by -a {argument.name}=VALUE")
        elif _is_plain(argument.default):
            values[argument.name] = _tuples_to_lists(argument.default)
    return values


def to_call_values(arguments: Sequence[Argument], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as the function takes them: lists become tuples if it declares tuples."""
    kinds = {argument.name: argument.kind for argument in arguments}
    return {
        name: tuple(value)
        if isinstance(value, list) and typing.get_origin(kinds[name]) is tuple
        else value
        for name, value in values.items()
    }


def _kind(parameter: inspect.Parameter, function: Callable[..., Any], label: str) -> Any:
    kind = parameter.annotation
    if isinstance(kind, str):
        try:
            kind = eval(kind, getattr(inspect.unwrap(function), "__globals__", {}))
        except Exception as error:
            raise InputError(
                f"the type {kind!r} of {parameter.name} in {label} cannot be read: {error}; "
                f"use {_TYPES}"
            ) from None
    if kind is REQUIRED:
        default = parameter.default
        kind = str if default is REQUIRED or default is None else type(default)
    if not _is_readable(kind):
        name = getattr(kind, "__name__", None) or str(kind)
        raise InputError(
            f"{parameter.name} of {label} has the type {name}, which no text can stand for; use "
            f"{_TYPES}"
        )
    return kind


def _is_readable(kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _is_readable(parts[0])
    if origin is Literal:
        return all(isinstance(part, str | int) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return all(part is types.NoneType or _is_readable(part) for part in parts)
    if origin is tuple:
        return len(parts) == 2 and parts[1] is ... and _is_readable(parts[0])
    if origin is list:
        return _is_readable(parts[0])
    return kind in (int, float, str, bool)


def _read(kind: Any, text: Any, label: str) -> Any:
    if not isinstance(text, str):
        return text  # already parsed, in a stored run
    try:
        return _value(kind, text.strip())
    except ValueError:
        raise InputError(f"{label} must be {_describe_type(kind)}, got {text!r}") from None


def _value(kind: Any, text: str) -> Any:
    """Return the value that a text represents; raise ValueError if the type has no such value."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = _value(parts[0], text)
        return value if all(value >= bound.least for bound in _bounds(parts)) else _no()
    if origin is Literal:
        return {str(part): part for part in parts}[text] if text in map(str, parts) else _no()
    if origin in (typing.Union, types.UnionType):
        if types.NoneType in parts and text.lower() == "none":
            return None
        for part in parts:
            try:
                return _value(part, text) if part is not types.NoneType else _no()
            except ValueError:
                continue
        return _no()
    if origin in (tuple, list):
        return [_value(parts[0], word.strip()) for word in text.split(",") if word.strip()]
    if kind is bool:
        return TRUTHS[text.lower()] if text.lower() in TRUTHS else _no()
    if kind is int:
        return int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text) else _no()
    if kind is float:
        number = float(text)
        return number if math.isfinite(number) else _no()
    return text


def _bounds(parts: Sequence[Any]) -> list[Minimum]:
    return [part for part in parts[1:] if isinstance(part, Minimum)]


def _no() -> Any:
    raise ValueError


def _describe_type(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return " ".join(
            [_describe_type(parts[0]), *(f"from {bound.least} on" for bound in _bounds(parts))]
        )
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if p is types.NoneType else _describe_type(p) for p in parts)
    if origin in (tuple, list):
        return f"{_describe_type(parts[0])}, or several with commas between"
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, "text")


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int)


def _tuples_to_lists(value: Any) -> Any:
    return list(map(_tuples_to_lists, value)) if isinstance(value, list | tuple) else value
