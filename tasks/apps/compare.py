"""When a program's output counts as the expected one: two named rules.

`strict` is for new results. `apps-official` is for comparing with published numbers. It accepts
exactly what the published checker accepts, including its faults: NO/YES/YES for YES/NO/YES, 3 1 2
for 1 2 3, and 100000001 for 100000000.

Both run in the trusted process on plain data. They return for every input, in about linear time.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any, Final

import numpy as np

# A number in usual notation. An integer with leading zeros is a text, because 0010 may be a bit
# string.
_INTEGER: Final = re.compile(r"[+-]?(?:0|[1-9][0-9]*)", re.ASCII)
_NUMBER: Final = re.compile(
    r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII
)
_TOLERANCE: Final = 1e-6
# Longer numbers are compared as texts, because floats cannot distinguish them.
_MAX_DIGITS: Final = 400


@dataclass(frozen=True, slots=True)
class Comparer:
    """A rule for each kind of program."""

    name: str
    """Its name as `comparer=`."""
    stdout: Callable[[str, str], bool]
    """Returns whether the output is right, given the texts (output, expected)."""
    value: Callable[[Any, Any, bool], bool]
    """Returns whether the value that a function returned is the expected JSON value, given (output,
    expected, may_unwrap). may_unwrap is true if every expected value of the problem is a list of
    one element, so the element itself may be meant."""
    arguments: Callable[[Sequence[Any]], list[Any]]
    """Makes the arguments of a call from JSON."""


def strict_stdout(output: str, expected: str) -> bool:
    """Return whether the lines have the same tokens in the same order, ignoring blank lines.

    Two tokens are the same if they are equal texts, or numbers, not both whole, that differ by at
    most 1e-6, absolutely or relatively. If the expected number is whole, only the absolute
    difference counts.
    """
    lines, expected_lines = _token_lines(output), _token_lines(expected)
    return len(lines) == len(expected_lines) and all(
        len(tokens) == len(expected_tokens) and all(map(_same_token, tokens, expected_tokens))
        for tokens, expected_tokens in zip(lines, expected_lines, strict=True)
    )


def _token_lines(text: str) -> list[list[str]]:
    return [tokens for line in text.split("\n") if (tokens := line.split())]


def _same_token(output: str, expected: str) -> bool:
    if output == expected:
        return True
    if max(len(output), len(expected)) > _MAX_DIGITS:
        return False
    is_integer = _INTEGER.fullmatch(expected) is not None
    if is_integer and _INTEGER.fullmatch(output):
        return False
    if not (_NUMBER.fullmatch(output) and _NUMBER.fullmatch(expected)):
        return False
    if is_integer:
        return _is_near_integer(Decimal(output), Decimal(expected))
    number, expected_number = float(output), float(expected)
    return (
        math.isfinite(number)
        and math.isfinite(expected_number)
        and _is_close(number, expected_number)
    )


def _is_close(output: float, expected: float) -> bool:
    if not (math.isfinite(output) and math.isfinite(expected)):
        return output == expected
    return abs(output - expected) <= _TOLERANCE * max(1.0, abs(expected))


def _is_near_integer(output: Decimal, expected: Decimal) -> bool:
    # From 2**53 on, floats would round different numbers to the same value.
    if output.adjusted() > _MAX_DIGITS:
        return False
    with localcontext() as context:
        context.prec = 3 * _MAX_DIGITS
        return abs(output - expected) <= Decimal("1e-6")


def strict_value(output: Any, expected: Any, may_unwrap: bool) -> bool:
    """Return whether a value is the expected one, or its only element if that may be meant.

    A bool is not a number, a tuple counts as a list, and floats may differ by 1e-6.

    Args:
        output: Value that the function returned.
        expected: The expected JSON value.
        may_unwrap: Whether the element of an expected list of one element is right too.
    """
    if _same_value(output, expected):
        return True
    return may_unwrap and len(expected) == 1 and _same_value(output, expected[0])


def _same_value(output: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(output, list | tuple)
            and len(output) == len(expected)
            and all(map(_same_value, output, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(output, dict) or len(output) != len(expected):
            return False
        named = {_json_key(key): value for key, value in output.items()}
        return named.keys() == expected.keys() and all(
            _same_value(named[key], value) for key, value in expected.items()
        )
    if isinstance(expected, float) or isinstance(output, float):
        return _same_number(output, expected)
    return type(output) is type(expected) and bool(output == expected)


def _same_number(output: Any, expected: Any) -> bool:
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in (output, expected)):
        return False
    if isinstance(expected, int):
        return bool(output == expected)  # Python compares int and float exactly
    try:
        return _is_close(float(output), expected)
    except OverflowError:
        return False


def _json_key(key: Any) -> Any:
    """Return a key as JSON writes it."""
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    # Python cannot write much longer ints as text, and no right key is that long.
    small = isinstance(key, int) and abs(key) < 10**400
    return str(key) if small or isinstance(key, float) else key


def strict_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call.

    If the first argument is a dict, its keys are converted back to integers.
    """
    return [_int_keys(value) if i == 0 else value for i, value in enumerate(arguments)]


def _int_keys(value: Any) -> Any:
    """Convert the text keys that JSON gave a dict to ints, if all of them are ints."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def official_stdout(output: str, expected: str) -> bool:
    """Return the verdict of the published checker. Each step works on the previous step's lines."""
    lines = output.splitlines()
    expected_text = expected.strip()
    if "\n".join(lines).strip() == expected_text:
        return True
    if "\n".join(line.strip() for line in lines).strip() == expected_text:
        return True
    # Expected lines of white space are kept as empty lines. The program's lines are not stripped.
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    if lines == expected_lines:
        return True
    lines = [line for line in lines if line]
    return (
        lines == expected_lines
        or _all_close(lines, expected_lines)
        or _same_sets(lines, expected_lines)
    )


def _all_close(lines: Sequence[str], expected: Sequence[str]) -> bool:
    try:
        numbers, expected_numbers = (
            [float(line) for line in lines],
            [float(line) for line in expected],
        )
    except ValueError:
        return False
    with np.errstate(all="ignore"):
        return len(numbers) == len(expected_numbers) and bool(
            np.allclose(numbers, expected_numbers)
        )


def _same_sets(lines: Sequence[str], expected: Sequence[str]) -> bool:
    token_sets = [frozenset(tokens) for line in lines if (tokens := line.split())]
    expected_sets = [frozenset(line.split()) for line in expected]
    if set(token_sets) == set(expected_sets):
        return True
    try:
        return _round_sets(token_sets) == _round_sets(expected_sets)
    except (ValueError, OverflowError):
        return False


def _round_sets(sets: Sequence[frozenset[str]]) -> list[list[float]]:
    """Return the distinct sets of rounded numbers, as sorted lists.

    They are not hashed, because a program could print many numbers whose sets share one hash, which
    would make comparing slow.
    """
    lines = [_distinct(round(float(token), 3) for token in tokens) for tokens in sets]
    if any(math.isnan(number) for line in lines for number in line):
        raise ValueError("a set with NaN is not equal to any other set")
    return _distinct(lines)


def _distinct(items: Iterable[Any]) -> list[Any]:
    return [item for item, _ in itertools.groupby(sorted(items))]


def official_value(output: Any, expected: Any, may_unwrap: bool) -> bool:
    """Return the result of the published checker for a returned value.

    Args:
        output: Value that the function returned.
        expected: The expected JSON value.
        may_unwrap: Ignored; the published checker always unwraps.
    """
    expected = _official_expected(expected)
    if isinstance(output, tuple):
        output = list(output)
    if output == expected:
        return True
    if isinstance(expected, list) and expected and output == expected[0]:
        return True
    try:
        if isinstance(output[0], tuple):
            return bool([list(item) for item in output] == expected[0])
    except (TypeError, LookupError):
        pass
    return False


def _official_expected(expected: Any) -> Any:
    if isinstance(expected, dict):
        keyed = _int_keys(expected)
        expected = expected if keyed is expected else [keyed]
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        keyed = _int_keys(expected[0])
        # The published checker drops everything after the dict, and so does this.
        expected = expected if keyed is expected[0] else [keyed]
    return expected


def official_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call as the published checker makes them.

    If the first argument is a dict with int keys, all arguments after it are dropped.
    """
    first = arguments[0] if arguments else None
    keyed = _int_keys(first)
    return list(arguments) if keyed is first else [keyed]


COMPARERS: Final = {
    comparer.name: comparer
    for comparer in (
        Comparer("strict", strict_stdout, strict_value, strict_arguments),
        Comparer("apps-official", official_stdout, official_value, official_arguments),
    )
}
