"""The two rules for when a program's output counts as the expected one."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.tasks.apps.compare import COMPARERS, Comparer, _round_sets
from treegen.tasks.apps.data import read_suite

STRICT, OFFICIAL = COMPARERS["strict"], COMPARERS["apps-official"]

# output, expected, accepted by strict, accepted by the published checker
STDOUT = {
    "same": ("YES\n", "YES\n", True, True),
    "other order of lines": ("NO\nYES\nYES\n", "YES\nNO\nYES\n", False, True),
    "repeated": ("1\n1\n1\n", "1\n", False, True),
    "part of a repetition": ("Christmas Eve\n", "Christmas Eve Eve Eve\n", False, True),
    "other order of tokens": ("3 1 2\n", "1 2 3\n", False, True),
    "near integer": ("100000001\n", "100000000\n", False, True),
    "near float in a line": ("0.12345 7\n", "0.1233 7\n", False, True),
    "extra blank lines": ("\n1\n\n2\n\n", "1\n2\n", True, True),
    "float for integer": ("1.0\n", "1\n", True, True),
    "integer for float": ("1\n", "1.0\n", True, True),
    "case": ("yes\n", "YES\n", False, False),
    "prompt on stdout": ("Enter: 5\n", "5\n", False, False),
    "trailing spaces": ("1 2 \n3\t\n", "1 2\n3", True, True),
    "carriage returns": ("1\r\n2\r\n", "1\n2\n", True, True),
    "joined lines": ("1 2 3\n", "1\n2\n3\n", False, False),
    "nothing for something": ("", "5\n", False, False),
    "something for nothing": ("5\n", "\n", False, False),
    "nothing for nothing": ("\n", "", True, True),
    "close floats": ("0.3333333\n", "0.33333333333\n", True, True),
    "not so close floats": ("0.334\n", "0.333\n", False, False),
    "not so close by relation": ("33333.4\n", "33333.3\n", False, True),
    "exponent": ("1e3\n", "1000.0\n", True, True),
    "large integers as floats": ("1e17\n", "100000000000000001\n", False, True),
    "float near a large integer": ("100000001.0\n", "100000000\n", False, True),
    "zeros in front": ("10\n", "0010\n", False, True),
    "underscores": ("1_000\n", "1000\n", False, True),
    "digits of other scripts": ("\uff11\uff12\n", "12\n", False, True),
    "not a number": ("nan\n", "1\n", False, False),
    "infinite floats": ("1e400\n", "1e500\n", False, True),
    "huge integers": ("1" * 5000 + "\n", "1" * 4999 + "2\n", False, True),
    "extra token": ("1 2 2\n", "1 2\n", False, True),
    "missing line": ("1\n", "1\n2\n", False, False),
    "line separator inside": ("a\u2028b\n", "a\nb\n", False, True),
    "expected line of spaces": ("1\n2\n", "1\n \n2\n", True, False),
}


@pytest.mark.parametrize("case", STDOUT)
def test_printed_output(case: str) -> None:
    output, expected, strict, official = STDOUT[case]
    assert (STRICT.stdout(output, expected), OFFICIAL.stdout(output, expected)) == (
        strict,
        official,
    )


# output, all expected values of the problem (the first is meant), strict, published checker
VALUES: dict[str, tuple[Any, list[Any], bool, bool]] = {
    "bare": (9, [9], True, True),
    "wrapped": (False, [[False], [True]], True, True),
    "bare list": ([1, 2], [[1, 2]], True, True),
    "first of several": (1, [[1, 2]], False, True),
    "element of a list among others": (1, [[1], [2, 3]], False, True),
    "tuple for list": ((1, 2), [[1, 2]], True, True),
    "wrapped tuple": ((1, 2), [[[1, 2]], [[3]]], True, True),
    "tuples in a list": ([(1, 2)], [[[1, 2]]], True, False),
    "wrapped tuples in a list": ([(1, 2)], [[[[1, 2]]], [[]]], True, True),
    "truth for one": (True, [1], False, True),
    "one for truth": (1, [[True]], False, True),
    "near float": (0.1 + 0.2, [0.3], True, False),
    "float for int": (2.0, [2], True, True),
    "int for float": (2, [2.0], True, True),
    "float near an int": (2.0000001, [2], False, False),
    "text for number": ("2", [2], False, False),
    "number for text": (2, [["2"], ["3"]], False, False),
    "none": (None, [None], True, True),
    "nothing for none": ([], [None], False, False),
    "keys that JSON made text": ({1: 2}, [{"1": 2}], True, True),
    "wrapped keys": ({1: [2]}, [[{"1": [2]}]], True, True),
    "other keys": ({1: 2}, [{"2": 2}], False, False),
    "set for list": ({1}, [[1]], False, False),
    "longer": ([1, 2, 3], [[1, 2]], False, False),
    "infinite": (math.inf, [1.5], False, False),
    "not a number": (math.nan, [1.5], False, False),
    "huge int for float": (10**400, [1.5], False, False),
}


@pytest.mark.parametrize("case", VALUES)
def test_returned_values(case: str) -> None:
    output, expected, strict, official = VALUES[case]
    suite = read_suite(
        json.dumps({"fn_name": "f", "inputs": [[]] * len(expected), "outputs": expected})
    )

    def accepts(comparer: Comparer) -> bool:
        cases = suite.cases(comparer)
        return cases.compare(output, cases.tests[0].expected)

    assert (accepts(STRICT), accepts(OFFICIAL)) == (strict, official)


@pytest.mark.parametrize(
    ("given", "strict", "official"),
    [
        ([1, "a"], [1, "a"], [1, "a"]),
        ([{"1": 2}, 3], [{1: 2}, 3], [{1: 2}]),
        ([{"x": 2}, 3], [{"x": 2}, 3], [{"x": 2}, 3]),
        ([], [], []),
    ],
)
def test_arguments_of_calls(given: list[Any], strict: list[Any], official: list[Any]) -> None:
    assert STRICT.arguments(given) == strict
    assert OFFICIAL.arguments(given) == official


def test_very_long_numbers_are_read() -> None:
    text = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[7]]})
    digits = "7" * 20_000
    suite = read_suite(text.replace("7", digits))
    assert suite.outputs == ([(10**20_000 - 1) // 9 * 7],)


def test_inputs_may_be_lists_of_lines() -> None:
    suite = read_suite(json.dumps({"inputs": [["2", "a b"]], "outputs": [["x", "y"]]}))
    assert (suite.inputs, suite.outputs) == (("2\na b",), ("x\ny",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no tests"),
        ("{}", "no tests"),
        ('{"inputs": [], "outputs": []}', "no tests"),
        ('{"inputs": ["1"]}', "no tests"),
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ("[" * 200_000, "nested"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs but 1 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be text or a list"),
        ('{"inputs": ["\\ud800"], "outputs": ["1"]}', "surrogate"),
        ('{"fn_name": "f()", "inputs": [[1]], "outputs": [1]}', "Python name"),
        ('{"fn_name": "f", "inputs": ["ab"], "outputs": [1]}', "lists of arguments"),
    ],
)
def test_tests_that_cannot_be_run(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_suite(text)


texts = st.text(st.sampled_from("01 2.\n-e+\r\u2028_naifxYES\uff11"), max_size=30)


@given(texts, texts)
def test_any_text_gets_an_answer(output: str, expected: str) -> None:
    strict, official = STRICT.stdout(output, expected), OFFICIAL.stdout(output, expected)
    assert isinstance(strict, bool) and isinstance(official, bool)
    assert STRICT.stdout(output, output)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(values, values)
def test_any_value_gets_an_answer(output: Any, expected: Any) -> None:
    plain = json.loads(json.dumps(expected))
    for comparer in (STRICT, OFFICIAL):
        assert comparer.value(output, plain, False) in (True, False)


TOKENS = st.sampled_from(["1", "1.0", "1.0004", "-0", "0", "inf", "nan", "2.5", "x"])
LINES = st.lists(st.frozensets(TOKENS), max_size=4)


@given(LINES, LINES)
def test_rounded_sets_are_equal_as_sets_are(actual: list[Any], expected: list[Any]) -> None:
    def as_sets(lines: list[Any]) -> set[frozenset[float]]:
        return {frozenset(round(float(token), 3) for token in line) for line in lines}

    def equal(rounded: Any) -> bool:
        try:
            return bool(rounded(actual) == rounded(expected))
        except ValueError:
            return False

    assert equal(_round_sets) == equal(as_sets)
