"""Tests of code in one run of the sandbox: asserts after a program, or many calls of its function.

Asserts are the published rule of HumanEval and MBPP: the program and its tests run in one process,
and the program passes if it reaches their end. So a program can cheat, as with the published
scorers. A random number proves that the end was reached: a program that exits early does not return
it.

Many calls share one run, because starting a process for each would be slow. The results come back
as plain data and numpy values, and the trusted process compares them. The expected results come
from the data's reference solution, which runs in the sandbox too. They never reach the program.

The comparison follows EvalPlus. Equal values are right. With a tolerance, or if the expected value
is a float or contains only floats, close values of the same type are right too. A few tasks have
rules of their own, by the function's name. After the first call that expects floats, all calls have
a tolerance. A comparison takes time and memory linear in the size of the result, even if the result
is hostile.
"""

import itertools
import math
import operator
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from typing import Any, Final, NamedTuple

import numpy as np

from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import Program, SandboxError, SandboxPool, TestCase

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
_ANY_RESULT: Final = "are_equivalent"  # every result of this task is right
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
    rule_atol: float
    """Absolute tolerance of a task's own rule: that of the task or of an earlier call."""
    atol: float
    """Absolute tolerance of the comparison."""


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
        rule_atol = atol
        if atol == 0 and _is_floats(value):
            atol = _FLOAT_TOLERANCE
        expected.append(ExpectedResult(value, result.type, rule_atol, atol))
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
        return _matches(kind, name, inputs, out, expected)
    except Exception:
        # As in EvalPlus, a result that cannot be compared is wrong.
        return False


def _matches(
    kind: str, name: str, inputs: Sequence[Any], out: CallValue, expected: ExpectedResult
) -> bool:
    value = out.value
    if kind == "mbpp" and name == _ANY_RESULT:
        return out.kind != OTHER or out.type != _ARRAYS  # an array is neither true nor false
    if kind == "mbpp" and name in ONLY_WHETHER:
        if out.type == _BOOL:
            return bool(value == expected.value)
        return bool(expected.value == (out.kind != VALUE or value is not None))
    if out.kind == OTHER:
        return False
    if kind == "humaneval" and name == "find_zero":
        terms = (number * math.pow(value, power) for power, number in enumerate(inputs[0]))
        return bool(abs(sum(terms)) <= expected.rule_atol)
    if is_listed(kind, name):
        exact = _make_set(value) == set(expected.value)
    else:  # numpy compares its numbers by its own rules, and arrays element by element
        exact = bool(out.kind == VALUE and value == expected.value)
    if kind == "mbpp" and name in _RULES:
        exact = exact or _RULES[name](value, expected.rule_atol, inputs)
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
        values, expected_values = np.asarray(out), np.asarray(expected)
        # Broadcasting pairs each row of one array with each column of the other.
        pairs = math.prod(np.broadcast_shapes(values.shape, expected_values.shape))
        if pairs > max(values.size, expected_values.size):
            return False
        return bool(np.allclose(values, expected_values, rtol=_RTOL, atol=atol))


def _all_numbers(value: Any) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list | tuple):
            pending.extend(item)
        elif not isinstance(item, Number | Decimal | np.bool_ | np.ndarray):
            return False
    return True


def _is_floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    if isinstance(value, np.ndarray):
        return value.dtype in (np.float64, np.float32)
    return isinstance(value, float)


def _make_set(values: Any) -> set[Any]:
    members = list({repr(value): value for value in values}.values())
    if max(Counter(map(hash, members)).values(), default=0) > _MAX_SAME_HASH:
        raise ValueError("too many members of one hash")
    return set(members)


def _is_pyramid_surface(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Return whether a result is the surface of a square pyramid of a base length and a height."""
    base, height = inputs
    slant = math.sqrt((base / 2) ** 2 + height**2)
    return bool(abs(out - round(base**2 + 2 * base * slant)) <= atol)


def _is_digit_distance(out: Any, atol: float, inputs: Sequence[Any]) -> bool:
    """Return whether a result is the sum of the differences of two numbers' digits, zero-padded."""
    first, second = map(str, inputs)
    width = max(len(first), len(second))
    pairs = zip(first.zfill(width), second.zfill(width), strict=True)
    return bool(out == sum(abs(int(a) - int(b)) for a, b in pairs))


_RULES: Final[Mapping[str, Callable[[Any, float, Sequence[Any]], bool]]] = {
    "sum_div": lambda out, atol, inputs: bool(out == 0),
    "surface_Area": _is_pyramid_surface,
    "digit_distance_nums": _is_digit_distance,
}


_END: Final = "_treegen_end"
NO_INPUT: Final = """\
def _treegen_no_input():
    import io
    import sys

    class WriteOnlyStringIO(io.StringIO):
        def read(self, *args, **kwargs):
            raise OSError

        readline = readlines = read

        def readable(self, *args, **kwargs):
            return False

    sys.stdin = WriteOnlyStringIO()


_treegen_no_input()
"""
"""Replaces standard input, as the scorers of HumanEval and EvalPlus do: reading from it fails."""
_PRELUDE: Final = f"{NO_INPUT}\n\ndef {_END}(number):\n    return number\n"


def assert_cases(suffix: str) -> ProgramCases:
    """Return the one test that runs a program, followed by test statements, to the end."""
    number = secrets.token_hex(16)
    test = TestCase(args=(number,), expected=number)
    return ProgramCases((test,), operator.eq, _PRELUDE, fn_name=_END, suffix=f"\n{suffix}")


CALLS: Final = 256  # maximum calls in one run

_BATCH_FUNCTION: Final = "_treegen_each"
_ERROR: Final = "error"
# Each result is copied before the next call, because a program may return the same list each time
# and change it. A call that fails ends the run, because the program then fails.
PRELUDE: Final = f'''\
{NO_INPUT}
class _treegen_Numpy:
    def __init__(self, dtype, dimensions, item):
        self.treegen_numpy = (dtype, dimensions, item)


def _treegen_numpy(value):
    """Return what stands for a number of numpy, or for an array of one element."""
    numpy = __import__("sys").modules["numpy"]
    is_array = isinstance(value, numpy.ndarray)
    if not (is_array and value.size == 1) and not isinstance(value, numpy.generic):
        raise TypeError
    kind, item = value.dtype.kind, value.item()
    if kind == "U" and not is_array:
        return str(value)
    if kind not in "biufcUO":
        raise TypeError
    name = {{"U": "str", "O": "object"}}.get(kind, value.dtype.name)
    if isinstance(item, numpy.longdouble):
        name, item = "longdouble", str(item)
    item = item if type(item).__module__ == "builtins" else _treegen_copy(item)
    return _treegen_Numpy(name, value.ndim if is_array else None, item)


def _treegen_copy(value):
    """Return a copy of plain data and of numpy's numbers; TypeError for anything else."""
    import sys
    from collections.abc import ItemsView, KeysView

    if type(value).__module__ == "numpy":
        return _treegen_numpy(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, dict):
        return {{_treegen_copy(key): _treegen_copy(item) for key, item in value.items()}}
    if isinstance(value, tuple):
        return tuple([_treegen_copy(item) for item in value])
    if isinstance(value, list):
        return [_treegen_copy(item) for item in value]
    if isinstance(value, (set, frozenset, KeysView, ItemsView)):
        return set([_treegen_copy(item) for item in value])
    for module, name in (("fractions", "Fraction"), ("decimal", "Decimal")):
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return value
    raise TypeError


def _treegen_result(value, listed):
    """Return what kind of result it is, a copy of it, and the name of its type."""
    name = f"{{type(value).__module__}}.{{type(value).__qualname__}}"
    try:
        return "{VALUE}", _treegen_copy(value), name
    except TypeError:
        pass
    try:
        if listed:
            return "{LISTED}", [_treegen_copy(item) for item in value], name
    except TypeError:
        pass
    return "{OTHER}", None, name


def {_BATCH_FUNCTION}(name, calls, listed):
    function, results = globals()[name], []
    for arguments in calls:
        try:
            results.append(_treegen_result(function(*arguments), listed))
        except BaseException as error:
            results.append(("{_ERROR}", None, type(error).__name__))
            break
    return results
'''

Same = Callable[[Sequence[Any], CallValue, ExpectedResult], bool]
"""Returns whether a result is right, given (arguments, result, expected result)."""


def call_cases(
    judge: SandboxPool,
    name: str,
    reference: str,
    parts: Sequence[Sequence[list[Any]]],
    same: Same,
    expect: Callable[[Sequence[CallValue]], Sequence[ExpectedResult]],
    *,
    listed: bool = False,
) -> ProgramCases:
    """Return tests that call a function with many inputs, part by part.

    A test has up to CALLS calls, of one part only, and passes if all of its calls pass.

    Args:
        judge: The sandbox in which the reference runs.
        name: The function's name.
        reference: A right program that defines the function.
        parts: For each part, the arguments of each call.
        same: Returns whether a result is right, given (arguments, result, expected result).
        expect: Makes the expected results of a part's calls from the results of the reference.
        listed: Whether results may be any iterable.

    Raises:
        SandboxError: The reference fails, so no program can be tested.
    """
    batches = [calls for part in parts for calls in _split_calls(part)]
    results_of: list[Any] = []

    def record_results(results: Any, _: Any) -> bool:
        results_of.append(results)
        return True

    judge.run(
        Program(reference, fn_name=_BATCH_FUNCTION, prelude=PRELUDE, may_return_numpy=True),
        [TestCase(args=(name, calls, listed)) for calls in batches],
        record_results,
        stop_at_failure=True,
    )
    if [len(group) for group in results_of] != [len(calls) for calls in batches] or any(
        result[0] == _ERROR for group in results_of for result in group
    ):
        raise SandboxError(
            f"the reference solution of {name} fails on its test inputs; remove the problem"
        )
    results = iter([CallValue(*result) for group in results_of for result in group])
    tests = []
    for part in parts:
        answers = expect(list(itertools.islice(results, len(part))))
        for calls in _split_calls(list(zip(part, answers, strict=True))):
            args = (name, [arguments for arguments, _ in calls], listed)
            tests.append(TestCase(args=args, expected=calls))

    def compare(output: Any, expected: Any) -> bool:
        return (
            isinstance(output, list)
            and len(output) == len(expected)
            and all(
                isinstance(result, tuple)
                and len(result) == 3
                and result[0] != _ERROR
                and same(arguments, CallValue(*result), expected_value)
                for result, (arguments, expected_value) in zip(output, expected, strict=True)
            )
        )

    return ProgramCases(
        tuple(tests), compare, PRELUDE, fn_name=_BATCH_FUNCTION, may_return_numpy=True
    )


def _split_calls(calls: Sequence[Any]) -> list[list[Any]]:
    """Return the calls in lists of up to CALLS, one for each test."""
    return [list(calls[start : start + CALLS]) for start in range(0, len(calls), CALLS)]
