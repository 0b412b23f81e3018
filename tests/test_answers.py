"""Reading a number from model text: what counts, what does not, and how long it takes."""

import re
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.tasks.answers import (
    canonical_number,
    exact_match_form,
    flexible_extract,
    numeric_answer,
    strict_match,
)
from treegen.tasks.base import Problem
from treegen.tasks.gsm8k import GSM8K


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "numeric"),
    [
        ("The answer is 18", "1", "18", "18"),
        ("The answer is 18.", "18", "18.", "18"),
        ("The answer is 18. So", "18.", "18.", "18"),
        ("The answer is $18.", None, "$18.", "18"),
        ("the answer is 18.", None, "18.", "18"),
        ("The answer is 29.00", "29.0", "29.00", "29"),
        ("The answer is 3-2 = 1.", "3", "1.", "1"),
        ("he made 5% ...", None, "...", "5"),
        ("#### 18\n\nQuestion: foo\n#### 7", None, "7", "7"),
        ("#### $18", None, "$18", "18"),
        ("####18", None, "18", "18"),
    ],
)
def test_readers_on_completions_that_tell_them_apart(
    text: str, strict: str | None, flexible: str, numeric: str
) -> None:
    assert strict_match(text) == strict
    assert flexible_extract(text) == flexible
    assert numeric_answer(text) == numeric


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The answer is 5. No, the answer is 18 dollars.", "18"),
        ("The answer is 18. Wait, the answer is unclear.", "18"),
        ("The final answer is **1,080**", "1080"),
        ("The answer is $\\boxed{72}$.", "72"),
        ("The answer is \\$1,234,567.50.", "1234567.5"),
        ("The answer is: 25%.", "25"),
        ("The answer is -$3.", "-3"),
        ("The answer is $-3.", "-3"),
        ("The answer is \u221210.", "-10"),
        ("The answer is 20. Because 5+5 = 10 each.", "20"),
        ("The answer is 2 * 9 = $18 a day.", "18"),
        ("The answer is 2 + 2 = 4 = **4**.", "4"),
        ("The answer is twelve, I think.\nThat is 12 eggs", "12"),
        ("10-3 is 7-2", "2"),
        ("-0.0", "0"),
        ("0.50", "0.5"),
        ("1e3", "1000"),
        ("2.5e-1", "0.25"),
        ("1e20000000", None),
        ("1e" + "9" * 5000, None),
        ("9" * 101, None),
        ("\uff11\uff12", None),
        ("1\uff12", None),
        ("1_000", "000"),
        ("no number here", None),
        ("", None),
        ("The answer is 1,2.", "1"),
    ],
)
def test_numeric_answer(text: str, want: str | None) -> None:
    assert numeric_answer(text) == (want if want != "000" else "0")


@pytest.mark.parametrize("text", ["18", "18.00", "$18", " 18% ", "0018", "1.8e1", "\u20ac18"])
def test_one_number_has_one_form(text: str) -> None:
    assert canonical_number(text) == "18"


@given(st.decimals(min_value=-(10**12), max_value=10**12, allow_nan=False, places=4))
def test_canonical_form_is_the_decimal_value(value: Decimal) -> None:
    form = canonical_number(f"{value:f}")
    assert form is not None
    assert Decimal(form) == value
    assert canonical_number(f"{value:,f}") == form
    assert canonical_number(form) == form
    assert not re.search(r"^-?0[0-9]|\.$|\.[0-9]*0$|^-0$", form)


@given(st.text(max_size=200) | st.text(alphabet="0123456789.,-$=#e% \nThe answer is", max_size=200))
def test_any_text_gets_a_verdict(text: str) -> None:
    verdicts = GSM8K().score(Problem("p", "q", "18"), text)
    assert set(verdicts) == set(GSM8K.filters)
    for verdict in verdicts.values():
        assert verdict.answer is None or any(c in "0123456789" for c in verdict.answer)
        assert verdict.answer is not None or not verdict.correct
    number = verdicts["numeric"].answer
    assert number is None or canonical_number(number) == number


@pytest.mark.parametrize(
    "unit",
    [
        "9", "1,000,", "1,0000", ".", ",", "-", "$", "$-", "the ", "the answer is ", "####",
        "The answer is 1", "1e", "1e5", "= ", "1=", "1 =\n", " ", "\uff11", "1\uff11", "-1.5e-5 ",
        "#### ", "The answer is 1,000,000,", "a", "00,",
    ],
)  # fmt: skip
def test_reading_takes_linear_time(unit: str) -> None:
    """A quadratic reader needs minutes for what a linear one does in well under a second."""
    for text in (unit * (200_000 // len(unit)), "The answer is " + unit * (200_000 // len(unit))):
        start = time.perf_counter()
        GSM8K().score(Problem("p", "q", "18"), text)
        assert time.perf_counter() - start < 2


@given(st.text(alphabet="0123456789.,$-# ", max_size=30))
def test_exact_match_form_is_what_the_expressions_leave(answer: str) -> None:
    want = answer
    for expression in (",", r"\$", r"(?s).*#### ", r"\.$"):
        want = re.sub(expression, "", want)
    assert exact_match_form(answer) == want.lower()


def test_exact_match_filters_keep_their_strictness() -> None:
    verdicts = GSM8K().score(Problem("p", "q", "29"), "The answer is 29.00.")
    assert [verdicts[name].correct for name in GSM8K.filters] == [True, False, False]
    verdicts = GSM8K().score(Problem("p", "q", "1,000"), "The answer is $1000.")
    assert [verdicts[name].correct for name in GSM8K.filters] == [True, False, True]


def test_punctuation_is_no_candidate() -> None:
    verdicts = GSM8K().score(Problem("p", "q", "5"), "he made 5% ...")
    assert verdicts["flexible-extract"].answer is None
    assert verdicts["numeric"].correct
