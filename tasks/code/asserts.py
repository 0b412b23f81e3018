"""Tests that are statements after the program, which passes if it reaches their end.

This is the published rule of HumanEval and MBPP: the program and its tests run in one process. So a
program can cheat, as with the published scorers. A random number proves that the end was reached: a
program that exits early does not return it.
"""

import secrets
from dataclasses import dataclass
from typing import Final

from treegen.tasks.sandbox import Compare, Program, TestCase

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


@dataclass(frozen=True, slots=True)
class AssertCases:
    """One test: the program, followed by its test statements, run to the end."""

    suffix: str
    """The text of the test statements, which follows the program after a newline."""
    tests: tuple[TestCase, ...]
    compare: Compare

    def program(self, source: str) -> Program:
        """Return a program followed by its test statements, as one source."""
        return Program(f"{source}\n{self.suffix}", fn_name=_END, prelude=_PRELUDE)


def assert_cases(suffix: str) -> AssertCases:
    """Return the test that runs `suffix` after a program."""
    number = secrets.token_hex(16)
    return AssertCases(suffix, (TestCase(args=(number,), expected=number),), _same)


def _same(output: object, expected: object) -> bool:
    return output == expected
