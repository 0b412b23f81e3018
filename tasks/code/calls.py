"""Tests of code in one run of the sandbox: asserts after a program, or many calls of its function.

Asserts are the published rule of HumanEval and MBPP: the program and its tests run in one process,
and the program passes if it reaches their end. So a program can cheat, as with the published
scorers. A random number proves that the end was reached: a program that exits early does not return
it.

Many calls share one run, because starting a process for each would be slow. The results come back
as plain data, and the trusted process compares them. The expected results come from the data's
reference solution, which runs in the sandbox too. They never reach the program.
"""

import itertools
import operator
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

from treegen.tasks.code.plus_compare import LISTED, OTHER, VALUE, CallValue, ExpectedResult
from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import Program, SandboxError, SandboxPool, TestCase

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

_EACH: Final = "_treegen_each"
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


def {_EACH}(name, calls, listed):
    function, found = globals()[name], []
    for arguments in calls:
        try:
            found.append(_treegen_result(function(*arguments), listed))
        except BaseException as error:
            found.append(("{_ERROR}", None, type(error).__name__))
            break
    return found
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
    """Return the runs of a function, part by part; a run passes if all of its calls pass.

    A run has up to CALLS calls, of one part only.

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
    batches = [calls for part in parts for calls in _runs(part)]
    results_of: list[Any] = []

    def keep(results: Any, _: Any) -> bool:
        results_of.append(results)
        return True

    judge.run(
        Program(reference, fn_name=_EACH, prelude=PRELUDE),
        [TestCase(args=(name, calls, listed)) for calls in batches],
        keep,
        stop_at_failure=True,
    )
    if [len(group) for group in results_of] != [len(calls) for calls in batches] or any(
        result[0] == _ERROR for group in results_of for result in group
    ):
        raise SandboxError(
            f"the reference solution of {name} fails on its own inputs; leave it out"
        )
    results = iter([CallValue(*result) for group in results_of for result in group])
    tests = []
    for part in parts:
        wanted = expect(list(itertools.islice(results, len(part))))
        for calls in _runs(list(zip(part, wanted, strict=True))):
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
                and same(arguments, CallValue(*result), wanted)
                for result, (arguments, wanted) in zip(output, expected, strict=True)
            )
        )

    return ProgramCases(tuple(tests), compare, PRELUDE, fn_name=_EACH)


def _runs(calls: Sequence[Any]) -> list[list[Any]]:
    return [list(calls[start : start + CALLS]) for start in range(0, len(calls), CALLS)]
