"""LiveCodeBench's tests: reads them from its fields, and compares results with expected ones.

Private tests are JSON, or the base64 of a zlib stream of a pickled text of JSON. They are never
unpickled, because `pickle.loads` executes what the file says. Only the one text is extracted.
"""

import base64
import binascii
import pickletools
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from treegen.tasks.apps.suite import json_value
from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import TestCase

# Allowed content of a pickle of one text: its frame, the text, and memo entries that are never
# read.
_HARMLESS: Final = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")
_TEXTS: Final = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_MOST_BYTES: Final = 1 << 30

# The published scorer puts these imports before every program, and solutions rely on them. Later
# imports override earlier ones, so their order matters.
_MODULES: Final = """
string re datetime collections heapq bisect copy math random statistics itertools functools
operator io sys json builtins typing
"""
PRELUDE: Final = (
    "".join(f"from {name} import *\n" for name in _MODULES.split())
    + "import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics\n"
    + "import itertools, functools, operator, io, sys, json\n"
    + "sys.setrecursionlimit(50000)\n"
)


def read_tests(public: Any, private: Any, fn_name: str | None) -> ProgramCases:
    """Return the tests in the fields of a row, the public ones first.

    Args:
        public: The public tests, as the row has them.
        private: The private tests, as the row has them.
        fn_name: The function to call; None for programs that print.

    Raises:
        ValueError: There are no tests, or they cannot be read.
    """
    cases = [
        *_parse_tests(public, "public_test_cases"),
        *_parse_tests(private, "private_test_cases"),
    ]
    if not cases:
        raise ValueError("it has no tests")
    tests = []
    for case in cases:
        test_input, wanted = (case.get(name) for name in ("input", "output"))
        if not isinstance(test_input, str) or not isinstance(wanted, str):
            raise ValueError("the input and output of a test must be text")
        if fn_name is None:
            tests.append(TestCase(stdin=test_input, expected=wanted))
        else:
            arguments = [json_value(line) for line in test_input.split("\n")]
            tests.append(TestCase(args=arguments, expected=json_value(wanted)))
    compare = same_lines if fn_name is None else same_value
    return ProgramCases(tuple(tests), compare, PRELUDE, fn_name)


def _parse_tests(field: Any, name: str) -> list[dict[str, Any]]:
    tests = field
    if isinstance(field, str):
        text = field.strip()
        tests = json_value(text if text.startswith("[") else packed_text(text))
    if not isinstance(tests, list) or not all(isinstance(case, dict) for case in tests):
        raise ValueError(f"{name} is not a list of tests")
    return tests


def packed_text(field: str) -> str:
    """Return the text from the base64 of a zlib stream of its pickle, without unpickling it.

    Raises:
        ValueError: The field has another format, or the pickle has other content than one text.
    """
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(field, validate=True), _MOST_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private tests are neither JSON nor packed: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError("private tests are more than 1 GiB")
    texts = []
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name in _TEXTS:
                texts.append(argument)
            elif code.name not in _HARMLESS:
                raise ValueError(f"private tests hold more than a text: {code.name}")
    except (ValueError, UnicodeDecodeError, IndexError, EOFError) as error:
        raise ValueError(f"private tests are no pickled text: {error}") from None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("private tests are not one pickled text")
    return texts[0]


def same_lines(output: str, expected: str) -> bool:
    """Return whether output has the expected lines, ignoring space around each line and around all.

    Two lines are the same if they are equal texts, or lists of equal decimal numbers.
    """
    lines, wanted = (text.strip().split("\n") for text in (output, expected))
    return len(lines) == len(wanted) and all(
        ours.strip() == theirs.strip() or _same_numbers(ours, theirs)
        for ours, theirs in zip(lines, wanted, strict=True)
    )


def _same_numbers(output: str, expected: str) -> bool:
    try:
        ours = [Decimal(token) for token in output.split()]
        return ours == [Decimal(token) for token in expected.split()]
    except (InvalidOperation, ValueError):
        return False


def same_value(output: Any, expected: Any) -> bool:
    """Return whether a result equals the expected one; a tuple counts as a list."""
    return bool((list(output) if isinstance(output, tuple) else output) == expected)
