"""Checks of single values that a user gives. No torch here."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import GenericAlias, NoneType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from treegen.errors import InputError, arg

_P = ParamSpec("_P")
_T = TypeVar("_T")
CacheMode = Literal["keep", "shared", "all"]
"""What an update of the weights computes again; see `LLM.update`."""
CACHE_MODES: Final[tuple[CacheMode, ...]] = get_args(CacheMode)
"""In order of how much they compute again."""


def check_number(name: str, value: object, *, above: float | None = None) -> None:
    """Raise InputError unless the value is a finite number, and more than its bound.

    Args:
        name: Name of the value in messages.
        value: The value.
        above: The bound; None is no bound.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise InputError(f"{arg(name)} must be a finite number, got {value!r:.200}")
    if above is not None and value <= above:
        raise InputError(f"{arg(name)} must be more than {above:g}, got {value!r:.200}")


def check_int(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> None:
    """Raise InputError unless the value is an integer within its bounds.

    Args:
        name: Name of the value in messages.
        value: The value.
        minimum: Lower bound; None is no bound.
        maximum: Upper bound; None is no bound.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{arg(name)} must be an integer, got {value!r:.200}")
    if minimum is not None and value < minimum:
        raise InputError(f"{arg(name)} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise InputError(f"{arg(name)} must be at most {maximum:,}, got {value}")


def check_counts(**counts: int | None) -> None:
    """Raise InputError unless each count is None or an integer of at least 1."""
    for name, count in counts.items():
        if count is not None:
            check_int(name, count, minimum=1)


def as_int(name: str, value: object) -> int:
    """Return an integer, also one of NumPy or torch, as an int; raise InputError for others."""
    # torch converts a tensor of one truth value to an integer.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if not is_bool and isinstance(value, SupportsIndex):
        with suppress(TypeError):
            return operator.index(value)
    raise InputError(f"{arg(name)} must be an integer, got {value!r:.200}")


def check_bool(name: str, value: object) -> None:
    """Raise InputError unless the value is True or False; the word "false" is not."""
    if not isinstance(value, bool):
        raise InputError(f"{arg(name)} must be True or False, got {value!r:.200}")


def device_name(value: object) -> str:
    """Return the text that names a device.

    Args:
        value: Text, or a `torch.device`. A bare number is an error, because builds of torch read it
            differently.

    Raises:
        InputError: It is neither.
    """
    if isinstance(value, str):
        return value
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(value)
    raise InputError(f"{arg('device')} must be auto, cpu, cuda or cuda:N, got {value!r:.60}")


def is_finite(value: float) -> bool:
    """Return whether a number is finite as a float; an integer may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """Return the elements of a list as a tuple, () for None; raise InputError for other values."""
    if values is None:
        return ()
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InputError(f"{arg(name)} must be a list, got {values!r:.200}")
    return tuple(values)


def check_argument_types(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function raise InputError for an argument whose type does not match its annotation.

    Only types are checked, also of elements of lists and tuples. The function itself checks bounds
    of numbers. An annotation whose names are imported only for type checkers is not checked.

    Args:
        function: A function, a coroutine function or an `__init__`.

    Returns:
        The function with the checks in front. A coroutine function stays one.
    """
    signature = inspect.signature(function)
    kinds: dict[str, Any] = {}

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # the call itself reports which name is wrong or missing
            return
        for name, value in bound.arguments.items():
            if name not in kinds:
                kinds[name] = _kind_of(signature.parameters[name], function)
            if not _has_type(value, kinds[name]):
                raise InputError(
                    f"{arg(name)} must be {_describe_annotation(kinds[name])}, got {_short(value)}"
                )

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checking_later(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            check(args, kwargs)
            return await function(*args, **kwargs)

        return cast("Callable[_P, _T]", checking_later)

    @functools.wraps(function)
    def checking(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        check(args, kwargs)
        return function(*args, **kwargs)

    return checking


def checked_class(kind: type[_T]) -> type[_T]:
    """Make a class check the arguments of its constructor as `check_argument_types` does.

    Args:
        kind: The class, such as a dataclass; it is changed in place.

    Returns:
        The class.
    """
    kind.__init__ = check_argument_types(kind.__init__)  # type: ignore[method-assign]
    return kind


def _kind_of(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the type in a parameter's annotation; Any if it cannot be resolved."""
    kind = parameter.annotation
    if parameter.kind is parameter.VAR_KEYWORD or kind is parameter.empty:
        return Any
    if isinstance(kind, str):
        try:
            kind = eval(kind, inspect.unwrap(function).__globals__)
        except (NameError, TypeError):
            return Any
    several = parameter.kind is parameter.VAR_POSITIONAL
    return GenericAlias(tuple, (kind, ...)) if several else kind


def _has_type(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is None or kind is NoneType:
        return value is None
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        is_number = isinstance(value, number) and not isinstance(value, bool)
        return is_number and value == value  # false for NaN
    if origin is abc.Callable:
        return callable(value)
    if origin in (abc.Sequence, abc.Iterable, abc.Collection, tuple, list):
        if isinstance(value, str | bytes) or not isinstance(value, abc.Iterable):
            return False
        if isinstance(value, Mapping):
            return bool(origin in (abc.Iterable, abc.Collection))
        if not isinstance(value, list | tuple) or not parts:
            return True
        if origin is tuple and parts[-1] is not ...:
            fits = len(value) == len(parts)
            return fits and all(_has_type(*pair) for pair in zip(value, parts, strict=True))
        part = parts[0]
        is_plain = isinstance(part, type) and part not in (Any, int, float)
        if is_plain and not hasattr(part, "_is_protocol"):
            # Lists may be long, so each type is checked once.
            return all(issubclass(element, part) for element in set(map(type, value)))
        return all(_has_type(item, part) for item in value)
    if not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True
    return isinstance(value, origin)


_NAMES: Final[Mapping[Any, str]] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "True or False",
    None: "None",
    NoneType: "None",
    abc.Callable: "a function",
    abc.Sequence: "a list",
    abc.Iterable: "a list",
    abc.Collection: "a list",
    tuple: "a list",
    list: "a list",
    abc.Mapping: "a mapping",
}


def _describe_annotation(kind: Any) -> str:
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe_annotation(part) for part in parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    name = _NAMES.get(origin, getattr(origin, "__name__", str(origin)))
    if origin is tuple and parts and parts[-1] is not ...:
        return f"({', '.join(map(_describe_annotation, parts))})"
    if origin in (abc.Sequence, abc.Iterable, abc.Collection, tuple, list) and parts:
        return f"{name} whose elements are {_describe_annotation(parts[0])}"
    return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_cache_mode(mode: object) -> None:
    """Raise InputError if `mode` is none of `CACHE_MODES`."""
    if mode not in CACHE_MODES:
        raise InputError(
            f"{arg('cache')} must be one of {', '.join(CACHE_MODES)}, got {mode!r:.60}"
        )
