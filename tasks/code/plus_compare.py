"""EvalPlus's rule for right results; runs in the trusted process on plain data.

Equal values are right. With a tolerance, or if the expected value is a float or holds only floats,
close values of the same type are right too. A few tasks have rules of their own, by the function's
name. After the first call that expects floats, all calls have a tolerance.

Everything takes time and memory linear in the size of the result, even for hostile results.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from typing import Any, Final, NamedTuple

import numpy as np

# Tasks whose result is a match object, so only its presence is compared.
ONLY_WHETHER: Final = ("check_str", "text_match_three", "text_starta_endb")
_AS_SETS: Final = (
    "similar_elements",
    "find_char_long",
    "common_in_nested_lists",
    "extract_singly",
    "larg_nnum",
    "intersection_array",
    "find_dissimilar",
    "Diff",
)
_ANYTHING: Final = "are_equivalent"  # every result of this task is right
_FLOAT_TOLERANCE: Final = 1e-6
_RTOL: Final = 1e-7
# A set takes quadratic time to build if its members were chosen to share a hash.
_MAX_SAME_HASH: Final = 16

VALUE: Final = "value"
LISTED: Final = "listed"
"""Kind of an iterable that is not plain data, such as a generator; its value is a list."""
OTHER: Final = "other"
"""Kind of a result that is not plain data, such as a match object."""
_BOOL: Final = "builtins.bool"
_ARRAYS: Final = "numpy.ndarray"


class CallValue(NamedTuple):
    """The result of a call, as it comes from the sandbox."""

    kind: str
    """VALUE, LISTED or OTHER."""
    value: Any
    """The result as plain data; None for OTHER."""
    type: str
    """The name of its type in the sandbox, with its module."""


class ExpectedResult(NamedTuple):
    """The expected result of a call."""

    value: Any
    """The expected result."""
    type: str
    """As in `CallValue`."""
    before: float
    """The tolerance of the task's own rule."""
    atol: float
    """The tolerance of the comparison."""


def is_listed(kind: str, name: str) -> bool:
    """Return whether a task's results are compared as sets, so that they may be generators."""
    return kind == "mbpp" and name in _AS_SETS


def build_expected(
    kind: str, name: str, atol: float, results: Sequence[CallValue]
) -> list[ExpectedResult]:
    """Return the expected results of calls, in the order of the calls.

    Args:
        kind: "humaneval" or "mbpp".
        name: The function's name.
        atol: The task's tolerance. A call that expects floats sets a tolerance for itself and for
            the calls after it.
        results: The results of the reference solution.
    """
    expected = []
    for result in results:
        value = result.value
        if kind == "mbpp" and name in ONLY_WHETHER:
            value = result.kind == OTHER or value is not None
        before = atol
        if atol == 0 and _floats(value):
            atol = _FLOAT_TOLERANCE
        expected.append(ExpectedResult(value, result.type, before, atol))
    return expected


def is_expected(
    kind: str, name: str, inputs: Sequence[Any], out: CallValue, expected: ExpectedResult
) -> bool:
    """Return whether a call's result counts as the expected one; never raise for a hostile result.

    Args:
        kind: "humaneval" or "mbpp".
        name: The function's name.
        inputs: The arguments of the call.
        out: The result of the call.
        expected: The expected result.
    """
    try:
        return _same(kind, name, inputs, out, expected)
    except Exception:
        # As in EvalPlus, a result that cannot be compared is wrong.
        return False


def _same(
    kind: str, name: str, inputs: Sequence[Any], out: CallValue, expected: ExpectedResult
) -> bool:
    value = out.value
    if kind == "mbpp" and name == _ANYTHING:
        return out.kind != OTHER or out.type != _ARRAYS  # an array is neither true nor false
    if kind == "mbpp" and name in ONLY_WHETHER:
        if out.type == _BOOL:
            return bool(value == expected.value)
        return bool(expected.value == (out.kind != VALUE or value is not None))
    if out.kind == OTHER:
        return False
    if kind == "humaneval" and name == "find_zero":
        return abs(_polynomial(inputs[0], value)) <= expected.before
    if is_listed(kind, name):
        exact = _distinct(value) == set(expected.value)
    else:  # numpy compares its numbers by its own rules, and arrays element by element
        exact = bool(out.kind == VALUE and value == expected.value)
    if kind == "mbpp" and name in _RULES:
        exact = exact or _RULES[name](value, expected.before, inputs)
    if exact or expected.atol == 0:
        return bool(exact)
    return out.type == expected.type and _close(value, expected.value, expected.atol)


def _close(out: Any, expected: Any, atol: float) -> bool:
    if isinstance(expected, list | tuple) and len(out) != len(expected):
        return False
    # From other items than numbers numpy would make arrays with items of the longest one's size.
    if not (_all_numbers(out) and _all_numbers(expected)):
        return False
    with np.errstate(all="ignore"):
        ours, theirs = np.asarray(out), np.asarray(expected)
        # Broadcasting pairs each row of one array with each column of the other.
        pairs = math.prod(np.broadcast_shapes(ours.shape, theirs.shape))
        if pairs > max(ours.size, theirs.size):
            return False
        return bool(np.allclose(ours, theirs, rtol=_RTOL, atol=atol))


def _all_numbers(value: Any) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list | tuple):
            left.extend(item)
        elif not isinstance(item, Number | Decimal | np.bool_ | np.ndarray):
            return False
    return True


def _floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    if isinstance(value, np.ndarray):
        return value.dtype in (np.float64, np.float32)
    return isinstance(value, float)


def _distinct(values: Any) -> set[Any]:
    members = list({repr(value): value for value in values}.values())
    if max(Counter(map(hash, members)).values(), default=0) > _MAX_SAME_HASH:
        raise ValueError("too many members of one hash")
    return set(members)


def _pyramid(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Return whether a result is the surface of a square pyramid, given its base and height."""
    base, height = inputs
    slant = math.sqrt((base / 2) ** 2 + height**2)
    return bool(abs(out - round(base**2 + 2 * base * slant)) <= atol)


def _digits(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Return whether a result is the sum of the digits' distances, the shorter one zero-padded."""
    first, second = map(str, inputs)
    width = max(len(first), len(second))
    pairs = zip(first.zfill(width), second.zfill(width), strict=True)
    return bool(out == sum(abs(int(a) - int(b)) for a, b in pairs))


_RULES: Final[Mapping[str, Callable[[Any, float, Sequence[Any]], bool]]] = {
    "sum_div": lambda out, atol, inputs: bool(out == 0),
    "surface_Area": _pyramid,
    "digit_distance_nums": _digits,
}


def _polynomial(coefficients: Sequence[float], at: float) -> float:
    return sum(coefficient * math.pow(at, power) for power, coefficient in enumerate(coefficients))
