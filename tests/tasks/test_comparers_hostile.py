"""Comparers on results made to cost much: time and memory stay linear in what a program sends."""

import json
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from treegen.tasks.apps.compare import COMPARERS
from treegen.tasks.code.calls import CallValue, ExpectedResult, is_expected
from treegen.tasks.code.livecodebench import same_lines, same_value
from treegen.tasks.sandbox import value_json

SIZE = 10_000  # characters that a program sends
# A list that is empty takes three characters, and 60 bytes; it is made twice.
FACTOR, AT_LEAST = 150, 1 << 20

Shape = Callable[[int], Any]
_PRIME = 2**61 - 1  # ints that differ by it have one hash


def _many(item: Any, num: int) -> list[Any]:
    return [item] * max(1, num // (len(value_json.dumps(item)) + 2))


VALUES: dict[str, Shape] = {
    "one long text": lambda num: "9" * num,
    "long texts, where each is as wide as the longest": lambda num: ["x" * num, *[""] * 249],
    "250 texts": lambda num: ["x" * (num // 250)] * 250,
    "texts in rows": lambda num: [["x" * (num // 20), ""], *[["", ""]] * (num // 20)],
    "a text among numbers": lambda num: [*_many(0.5, num // 2), "x" * (num // 2)],
    "a long int among numbers": lambda num: [*_many(0.5, num), 10**4_000],
    "long ints": lambda num: [10**900 + each for each in range(num // 800)],
    "ints": lambda num: list(range(num // 8)),
    "floats": lambda num: [each / 7 for each in range(num // 20)],
    "nan": lambda num: _many(float("nan"), num),
    "infinite": lambda num: _many(float("inf"), num),
    "empty lists": lambda num: _many([], num),
    "empty tuples": lambda num: _many((), num),
    "one column": lambda num: [_many([0.5], num)],
    "rows of other lengths": lambda num: [[0.5] * (each % 7) for each in range(num // 25)],
    "deep": lambda num: _nested(90),
    "many deep": lambda num: [_nested(90)] * (num // 200),
    "as deep as numpy goes": lambda num: [_nested(60)] * (num // 130),
    "dicts": lambda num: _many({"a": 0.5}, num),
    "keys of one hash": lambda num: {each * _PRIME: 0 for each in range(16)},
    "dict of ints": lambda num: {each: each for each in range(num // 25)},
    "sets": lambda num: _many({1}, num),
    "one set": lambda num: set(range(num // 8)),
    "complex": lambda num: _many(1j, num),
    "ints of one hash": lambda num: [each * _PRIME for each in range(num // 30)],
    "tuples of one hash": lambda num: [(-1 - each % 2, each % 3 - 2) for each in range(num // 30)],
    "tuples of texts": lambda num: [("x" * (num // 150),)] * 150,
    "none": lambda num: [None] * (num // 6),
}
TEXTS: dict[str, Callable[[int], str]] = {
    "one line": lambda num: "9" * num,
    "lines": lambda num: "1\n" * (num // 2),
    "blank lines": lambda num: "\n" * num,
    "blanks": lambda num: " " * num,
    "tokens": lambda num: "1 " * (num // 2),
    "floats": lambda num: "\n".join(f"{each}.5" for each in range(num // 8)),
    "one hash": lambda num: "\n".join(str(each * _PRIME) for each in range(num // 20)),
    "huge powers": lambda num: "1e999999999\n" * (num // 12),
    "long numbers": lambda num: ("9" * 399 + ".5\n") * (num // 402),
    "longer numbers": lambda num: ("9" * 5_000 + "\n") * (num // 5_001),
    "wide characters": lambda num: "\U0001f600" * (num // 4),
    "odd line ends": lambda num: "\x0b\x0c\x1c\x85\u2028" * (num // 10),
}


def _nested(depth: int) -> Any:
    found: Any = 0.5
    for _ in range(depth):
        found = [found]
    return found


def _cost(call: Callable[[], object]) -> int:
    """Bytes that a call holds at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _wanted(value: Any, atol: float) -> ExpectedResult:
    return ExpectedResult(value, f"builtins.{type(value).__name__}", atol, atol)


NAMES = (
    ("humaneval", "f", "value"),
    ("humaneval", "f", "array"),
    ("humaneval", "find_zero", "value"),
    ("mbpp", "Diff", "value"),
    ("mbpp", "Diff", "listed"),
    ("mbpp", "surface_Area", "value"),
    ("mbpp", "sum_div", "value"),
    ("mbpp", "digit_distance_nums", "value"),
)
EXPECTED: tuple[Any, ...] = (0.5, [0.5], [[0.5] * 250], [0.5] * 250, "x", {1}, {"a": 1}, [[1]], ())


def _plus(out: Any) -> None:
    for kind, name, how in NAMES:
        result = CallValue(how, out, f"builtins.{type(out).__name__}")
        for expected in (*EXPECTED, out):
            assert is_expected(kind, name, [3, 4], result, _wanted(expected, 1e-6)) in (0, 1)


def _value_rules(out: Any) -> None:
    for expected in (*EXPECTED, [out], out):
        if not isinstance(expected, set | tuple):
            for rule in COMPARERS.values():
                assert rule.value(out, expected, False) in (0, 1)
        assert same_value(out, expected) in (0, 1)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("compare", [_plus, _value_rules])
def test_comparing_values_takes_linear_time(name: str, compare: Callable[[Any], None]) -> None:
    text = value_json.dumps(VALUES[name](SIZE))
    assert len(text) < 1.5 * SIZE or "deep" in name
    cost = _cost(lambda: compare(value_json.loads(text)))
    assert cost < AT_LEAST + FACTOR * len(text), f"{cost:,} bytes for {len(text):,} characters"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("rule", [*(rule.stdout for rule in COMPARERS.values()), same_lines])
def test_comparing_texts_takes_linear_time(name: str, rule: Callable[[str, str], bool]) -> None:
    text = TEXTS[name](SIZE)

    def compare() -> None:
        for expected in ("", "1", "1\n2", "0.5 0.25", text[: SIZE // 2], text, text[::-1]):
            assert rule(text, expected) in (0, 1)

    cost = _cost(compare)
    assert cost < AT_LEAST + FACTOR * len(text), f"{cost:,} bytes for {len(text):,} characters"


def _read_and_compare(text: str) -> None:
    _value_rules(value_json.loads(text))


def test_decoding_values_takes_linear_time() -> None:
    rng = random.Random(0)
    parts = [
        "[]",
        '{"tuple":[]}',
        '{"set":[1]}',
        '{"int":"0x1"}',
        '{"complex":[0,1]}',
        '"x"',
        "1",
        '{"dict":[[1,[]]]}',
        '{"fraction":[1,2]}',
        '{"decimal":"1e99"}',
        "null",
        "1e999",
        '{"fraction":[1,0]}',
        '{"decimal":"x"}',
        '{"decimal":5}',
        '{"x":1}',
        "{}",
    ]
    read = 0
    for _ in range(60):
        few = [part for part in parts[:12] if rng.random() < 0.5] or ["[]"]
        few += [rng.choice(parts)] if rng.random() < 0.5 else []
        text = f"[{','.join(rng.choices(few, k=1_000))}]"
        try:
            cost = _cost(partial(_read_and_compare, text))
            read += 1
        except ValueError:
            continue
        assert cost < AT_LEAST + FACTOR * len(text)
    assert read > 20
    for text in (
        '{"decimal":"' + "9" * 10**6 + '"}',
        '{"fraction":[1,{"int":"0x' + "f" * 40_000 + '"}]}',
        json.dumps({"decimal": "1" * 4_001}),
    ):
        with pytest.raises(ValueError, match="more than 4,000"):
            value_json.loads(text)


ODD = (
    '{"decimal":"sNaN"}',
    '{"decimal":"-sNaN12"}',
    '{"decimal":[0,[1,2],5]}',
    '{"decimal":"1E+999999999999999999"}',
    '{"decimal":"1E-999999999999999999"}',
    '{"decimal":"NaN"}',
    '{"fraction":[1,3]}',
    '{"complex":[NaN,1]}',
    '{"int":[1]}',
    '"\\ud800"',
    "NaN",
    "-Infinity",
    "1e999",
    '{"set":"aa"}',
    '{"dict":["ab"]}',
    '{"tuple":null}',
    '{"numpy":["int64",1,5]}',
    '{"numpy":["float64",null,0.5]}',
)


@pytest.mark.parametrize("inside", ["{}", "[{}]", '{{"tuple":[{}]}}', '{{"dict":[["a",{}]]}}'])
@pytest.mark.parametrize("odd", ODD)
def test_no_value_makes_a_comparer_fail(odd: str, inside: str) -> None:
    """A comparer that fails is the judge's error, and so the program would have no verdict."""
    try:
        found = value_json.loads(inside.format(odd))
    except ValueError:
        return
    lists: tuple[list[Any], ...] = ([], [5], [5, 6], [[0.5]], [{"a": 5}])
    for expected in (5, 10**400, 0.5, "a", None, True, {"a": 5}, *lists):
        for rule in COMPARERS.values():
            assert rule.value(found, expected, isinstance(expected, list)) in (0, 1)
        assert same_value(found, expected) in (0, 1)


def test_a_decimal_is_a_text_of_few_digits() -> None:
    for body in ("[0,[1,2],5]", f"[0,[{','.join('1' * 9_000)}],0]", "1", "null", '"sNaN"'):
        with pytest.raises(ValueError, match=r"decimal|nan"):
            value_json.loads(f'{{"decimal":{body}}}')


def test_nan_equals_no_nan_inside_of_lists_either() -> None:
    assert value_json.loads("[NaN]") != value_json.loads("[NaN]")
