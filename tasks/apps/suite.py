"""A problem's tests, read from the JSON of its input_output."""

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from treegen.tasks.apps.compare import Comparer
from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import TestCase

# int(text) fails for more digits than Python's limit. Decimal has no limit.
_LONG: Final = 4000

# The published checker puts this before every program, and solutions in the data rely on it.
PRELUDE: Final = """\
import collections, fractions, heapq, itertools, math, random, sys, time
import numpy as np
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from functools import lru_cache
from heapq import *
from itertools import accumulate, combinations, permutations, product
from math import ceil, cos, exp, fabs, floor, gcd, log, log2, sin, sqrt, tan
from typing import List, Tuple
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """All tests of one problem."""

    fn_name: str | None
    """The function to call; None for programs that print."""
    inputs: tuple[Any, ...]
    """Texts for programs that print, otherwise lists of arguments."""
    outputs: tuple[Any, ...]
    """Texts for programs that print, otherwise expected values."""

    def cases(self, comparer: Comparer) -> ProgramCases:
        """Return the tests for the sandbox."""
        pairs = zip(self.inputs, self.outputs, strict=True)
        if self.fn_name is None:
            tests = [TestCase(stdin=text, expected=wanted) for text, wanted in pairs]
            return ProgramCases(tuple(tests), comparer.stdout, PRELUDE)
        may_unwrap = all(isinstance(value, list) and len(value) == 1 for value in self.outputs)
        tests = [
            TestCase(args=comparer.arguments(values), expected=wanted) for values, wanted in pairs
        ]

        def compare(output: Any, expected: Any) -> bool:
            return comparer.value(output, expected, may_unwrap)

        return ProgramCases(tuple(tests), compare, PRELUDE, self.fn_name)


def read_suite(text: str) -> Suite:
    """Return the tests in a JSON text.

    Raises:
        ValueError: There are no tests, so every program would pass, or they cannot be run.
    """
    content = json_value(text) if text.strip() else {}
    if not isinstance(content, dict):
        raise ValueError("input_output must be a JSON object")
    inputs, outputs, fn_name = content.get("inputs"), content.get("outputs"), content.get("fn_name")
    if not inputs or not outputs:
        raise ValueError("it has no tests")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs must be lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs but {len(outputs)} outputs")
    if fn_name is None:
        return Suite(None, tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not isinstance(fn_name, str) or not fn_name.isidentifier():
        raise ValueError(f"fn_name {str(fn_name)[:40]!r} is not a Python name")
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("the inputs of a function must be lists of arguments")
    return Suite(fn_name, tuple(inputs), tuple(outputs))


def json_value(text: str) -> Any:
    """Return the value of a JSON text, however long its numbers.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _int(text: str) -> int:
    return int(text) if len(text) < _LONG else int(Decimal(text))


def _text(value: Any) -> str:
    """Return an input or output as text, from a text or a list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("an input or output must be text or a list of lines")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("an input or output holds half of a surrogate pair") from None
    return value
