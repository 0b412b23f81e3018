"""When EvalPlus counts a result as the expected one; runs in the trusted process on plain data.

Equal values are. Where a tolerance is given, or the expected value is a float or holds floats only,
close ones of the same type are too. A few tasks have rules of their own, by the function's name.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

# Tasks whose result is a match object, so that only whether there is one is compared.
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
_FLOAT_TOLERANCE: Final = 1e-6
_RTOL: Final = 1e-7
# A set takes quadratic time to build if its members were chosen to have one hash.
_MAX_SAME_HASH: Final = 16

OTHER: Final = "other"
"""Stands for a result that is no plain data, such as a match object."""


def same(kind: str, name: str, atol: float, inputs: Sequence[Any], out: Any, expected: Any) -> bool:
    """Return whether a call's result counts as the expected one, whatever the result is.

    kind: "humaneval" or "mbpp".
    name: the function's name.
    atol: the task's tolerance.
    out: the result as it comes from the sandbox: ("value", it), or ("other", None).
    """
    found, value = out
    try:
        if kind == "mbpp" and name in ONLY_WHETHER:
            if found != OTHER and isinstance(value, bool):
                return bool(value == expected)
            return bool(expected == (found == OTHER or value is not None))
        if found == OTHER:
            return False
        if kind == "humaneval" and name == "find_zero":
            return abs(_polynomial(inputs[0], value)) <= atol
        return _accepted(kind, name, atol, inputs, value, expected)
    except Exception:
        # As in EvalPlus: what cannot be compared is wrong.
        return False


def _accepted(
    kind: str, name: str, atol: float, inputs: Sequence[Any], out: Any, expected: Any
) -> bool:
    exact = out == expected
    if kind == "mbpp":
        if name in _AS_SETS:
            exact = _distinct(out) == set(expected)
        elif name in _RULES:
            exact = exact or _RULES[name](out, atol, inputs)
    if atol == 0 and _floats(expected):
        atol = _FLOAT_TOLERANCE
    if exact or atol == 0:
        return bool(exact)
    if type(out) is not type(expected):
        return False
    if isinstance(expected, list | tuple) and len(out) != len(expected):
        return False
    with np.errstate(all="ignore"):
        return bool(np.allclose(out, expected, rtol=_RTOL, atol=atol))


def _floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _distinct(values: Any) -> set[Any]:
    members = list({repr(value): value for value in values}.values())
    if max(Counter(map(hash, members)).values(), default=0) > _MAX_SAME_HASH:
        raise ValueError("too many members of one hash")
    return set(members)


def _pyramid(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Whether a result is the surface of a pyramid whose height is that of its apex."""
    base, height = inputs
    slant = math.sqrt((base / 2) ** 2 + height**2)
    return bool(abs(out - round(base**2 + 2 * base * slant)) <= atol)


def _digits(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Whether a result is the sum of the digits' distances, with zeros before the shorter one."""
    first, second = map(str, inputs)
    width = max(len(first), len(second))
    pairs = zip(first.zfill(width), second.zfill(width), strict=True)
    return bool(out == sum(abs(int(a) - int(b)) for a, b in pairs))


_RULES: Final[Mapping[str, Callable[[Any, float, Sequence[Any]], bool]]] = {
    "are_equivalent": lambda out, atol, inputs: True,
    "sum_div": lambda out, atol, inputs: bool(out == 0),
    "surface_Area": _pyramid,
    "digit_distance_nums": _digits,
}


def _polynomial(coefficients: Sequence[float], at: float) -> float:
    return sum(each * math.pow(at, power) for power, each in enumerate(coefficients))
