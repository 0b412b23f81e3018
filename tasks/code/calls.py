"""Many calls of a program's function in one run: starting one for each would take most of the time.

The results come back as plain data and are compared by the trusted process. The expected ones never
reach the program. They are those of the data's reference solution, which runs in the sandbox too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from treegen.tasks.judge import Compare, Judge, JudgeError, Program, Test

CALLS: Final = 256  # of one run

_EACH: Final = "_treegen_each"
# A call that fails ends the run, because the program fails with it.
PRELUDE: Final = f'''\
def _treegen_plain(value):
    """Return ("value", value) of plain data, ("other", None) of anything else."""
    plain = (bool, int, float, complex, str, type(None))
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.keys())
            left.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset)):
            left.extend(each)
        elif not isinstance(each, plain):
            if type(each).__module__ != "numpy" or getattr(each, "shape", None) != ():
                return "other", None
    return "value", value


def {_EACH}(name, calls):
    function, found = globals()[name], []
    for arguments in calls:
        try:
            found.append(_treegen_plain(function(*arguments)))
        except BaseException as error:
            found.append(("error", type(error).__name__))
            break
    return found
'''

Same = Callable[[Sequence[Any], Any, Any], bool]
"""(arguments, result, expected result): whether the result is right."""


@dataclass(frozen=True, slots=True)
class CallCases:
    """Runs of up to CALLS calls each; a run passes if all of its calls do."""

    tests: tuple[Test, ...]
    compare: Compare

    def program(self, source: str) -> Program:
        """Return a program of which one function is called many times."""
        return Program(source, fn_name=_EACH, prelude=PRELUDE)


def call_cases(
    judge: Judge,
    name: str,
    reference: str,
    parts: Sequence[Sequence[list[Any]]],
    same: Same,
    expect: Callable[[Any], Any],
) -> CallCases:
    """Return the runs of a function, part by part. A run has calls of one part only.

    name: the function's name.
    reference: a program that defines it and is right.
    parts: the arguments of each call.
    expect: makes the expected result of what the reference gives.

    Raises:
        JudgeError: the reference fails, so that no program can be judged.
    """
    runs = [
        [list(calls[start : start + CALLS]) for start in range(0, len(calls), CALLS)]
        for calls in parts
    ]
    asked = [calls for part in runs for calls in part]
    known: list[Any] = []

    def keep(found: Any, _: Any) -> bool:
        known.append(found)
        return True

    judge.run(
        Program(reference, fn_name=_EACH, prelude=PRELUDE),
        [Test(args=(name, calls)) for calls in asked],
        keep,
        stop_at_failure=True,
    )
    if [len(found) for found in known] != [len(calls) for calls in asked]:
        raise JudgeError(f"the reference solution of {name} fails on its own inputs")
    tests = []
    for calls, found in zip(asked, known, strict=True):
        if any(kind == "error" for kind, _ in found):
            raise JudgeError(f"the reference solution of {name} fails on its own inputs")
        expected = [expect(result) for result in found]
        tests.append(Test(args=(name, calls), expected=list(zip(calls, expected, strict=True))))

    def compare(found: Any, expected: Any) -> bool:
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(
                isinstance(result, tuple) and len(result) == 2 and result[0] != "error"
                and same(arguments, result, wanted)
                for result, (arguments, wanted) in zip(found, expected, strict=True)
            )
        )  # fmt: skip

    return CallCases(tuple(tests), compare)
