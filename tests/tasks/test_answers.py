"""Reading a number from model text: what counts, what does not, and how long it takes."""

import random
import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.evals.problem import Problem
from treegen.tasks.common import answers
from treegen.tasks.common.answers import (
    exact_match_form,
    flexible_extract,
    is_whole,
    numeric_answer,
    strict_match,
)
from treegen.tasks.common.arithmetic import canonical_number, plain_digits, result
from treegen.tasks.common.letters import is_hedged
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
        ("The answer is 12 = 3 x 4.", "12", "4.", "12"),
        ("The answer is 20% of 50 = 10.", "20", "10.", "10"),
        ("The answer is 3/4.", "3", "4.", "0.75"),
        ("The answer is 1 000 000.", "1", "000.", "1000000"),
        ("The answer is not 5, it is 6.", None, "6.", "6"),
        ("he made 5% ...", None, "...", "5"),
        ("#### 18\n\nQuestion: foo\n#### 7", None, "7", "7"),
        ("#### $18", None, "$18", "18"),
        ("####18", None, "18", "18"),
    ],
)
def test_three_answer_readers_on_one_completion(
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
        ("10-3 is 7-2", None),
        ("-0.0", "0"),
        ("0.50", "0.5"),
        ("1e3", "1000"),
        ("2.5e-1", "0.25"),
        ("1e20000000", None),
        ("1e" + "9" * 5000, None),
        ("9" * 101, None),
        ("1_000", "1000"),
        ("no number here", None),
        ("", None),
    ],
)
def test_numeric_answer(text: str, want: str | None) -> None:
    assert numeric_answer(text) == want


@pytest.mark.parametrize("before", ["", "The answer is "])
@pytest.mark.parametrize(
    ("text", "want"),
    [
        # what follows the last sign of equality
        ("12 = 3 x 4", "12"),
        ("2^3 = 8", "8"),
        ("2**10", "1024"),
        ("2^3^2", "512"),
        ("3 + 4 = 7 = x", "7"),
        ("2x + 3 = 7", "7"),
        ("2(16)-8=24", "24"),
        ("(1/4)(160)", "40"),
        ("2 * (3 + 4)", "14"),
        ("( 80 - 21 ) + 7", "66"),
        ("16 -3", "13"),
        ("8 - 2 - 1", "5"),
        ("4 \u00f7 2 \u00d7 3", "6"),
        ("3 \\times 4 = \\boxed{12}", "12"),
        ("**3 x 4**", "12"),
        ("3 boxes x 4 apples = 12 apples", "12"),
        ("3 boxes x 4", "12"),
        ("10000 m^2", "10000"),
        ("6 canes / 2 canes/cavity = 3 cavities", "3"),
        ("4 x a day", "4"),
        # shares
        ("20% of 50 = 10", "10"),
        ("20% of the 50", "10"),
        ("50 * 20%", "10"),
        ("20%", "20"),
        ("100% - 20%", "80"),
        ("20% of 50 pens = 10 pens", "10"),
        ("3/4 of 20", "15"),
        # fractions
        ("3/4", "0.75"),
        ("1/3", "1/3"),
        ("-2/6", "-1/3"),
        ("6/3", "2"),
        ("1 1/2 cups", "1.5"),
        ("1 1/2.", "1.5"),
        ("1\\frac{1}{2}", "1.5"),
        ("\\boxed{\\frac{2}{3}}", "2/3"),
        ("\u00bd", "0.5"),
        # thousands and decimal commas
        ("1 000 000", "1000000"),
        ("1\xa0234\xa0567", "1234567"),
        ("1'000", "1000"),
        ("1{,}000", "1000"),
        ("12,34", "12.34"),
        ("1 000,5", "1000.5"),
        ("1,2", "1.2"),
        # other digits
        ("\uff11\uff12", "12"),
        ("1\uff12", "12"),
        ("\u0661\u0662\u066b\u0665", "12.5"),
        ("\uff12\uff0b\uff13\uff1d\uff15", "5"),
        ("\u06f3", "3"),
        # what was meant
        ("not 5, it is 6", "6"),
        ("6, not 5", "6"),
        ("not 5 but 6", "6"),
        ("not 5", None),
        # nothing that can be told
        ("9^9^9", None),
        ("9^99999", None),
        ("1/0", None),
        ("1/0 = x", None),
        ("9" * 101, None),
    ],
)
def test_calculations_come_to_their_result(before: str, text: str, want: str | None) -> None:
    assert numeric_answer(f"{before}{text}") == want


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("5-10", None, None),
        ("$5-$10", None, None),
        ("555-1234", None, None),
        ("24/12/2020", None, None),
        ("1,2,3", None, None),
        ("10,20,30", None, None),
        ("12 200-gram bags", "12", "200"),
        ("18-year-old twins, 2 of them", "18", "2"),
        ("5 (since 2 + 3 = 5)", "5", "5"),
        ("20 because 5+5 = 10", "20", "10"),
    ],
)
def test_ranges_and_lists_are_no_calculations(
    text: str, first: str | None, last: str | None
) -> None:
    assert numeric_answer(f"The answer is {text}") == first
    assert numeric_answer(text) == last


def test_calculations_agree_with_python() -> None:
    """Random expressions, written with the signs and spaces that models use."""
    draw = random.Random(0)
    signs = {"+": "+", " - ": "-", "*": "*", " x ": "*", " / ": "/", " \u00d7 ": "*"}
    for _ in range(2000):
        parts = [str(draw.randrange(1, 30))]
        for _ in range(draw.randrange(1, 6)):
            parts += [draw.choice(list(signs)), str(draw.randrange(1, 30))]
        if len(parts) > 4 and draw.random() < 0.5:
            parts[2], parts[4] = f"({parts[2]}", f"{parts[4]})"
        exact = "".join(signs.get(p, re.sub(r"([0-9]+)", r"Fraction(\1)", p)) for p in parts)
        if len(parts) == 3 and parts[1] == " / ":
            parts[1] = "/"
        try:
            want = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            want = None
        found = numeric_answer("".join(parts))
        assert (None if found is None else Fraction(found)) == want, "".join(parts)


@pytest.mark.parametrize(
    "text",
    [
        "18",
        "18.00",
        "$18",
        " 18% ",
        "0018",
        "1.8e1",
        "\u20ac18",
        "36/2",
        "\uff11\uff18",
        "\u0661\u0668",
    ],
)
def test_one_number_has_one_form(text: str) -> None:
    assert canonical_number(text) == "18"


_PIECES = (
    "the answer is",
    "The  Answer\nis",
    "the final answer is",
    "the correct\tanswer is",
    "answer",
    "the",
    "is",
    "####",
    "# ###",
    "12",
    "3,000",
    "$5.50",
    "20% of 50 = 10",
    "not ",
    "isn't ",
    "\n",
    "\r\n",
    " ",
    "\u0130",
    "\u212a",
    "theanswer is",
    "bathe answer is",
    "the answer isn",
    "1/2",
    "\\frac{1}{2}",
    "(2+3)*4",
    "x",
    "=",
    "-7",
    "5-10",
    ".",
    "..",
    ",",
    "$",
    "m^2",
    "\u00bd",
    "\uff13",
    "1 000 000",
    "\x0b",
    "\u2028",
    "final",
    "is 4",
    "answerthe answer is 9",
    "\\boxed{",
    "}",
    "if ",
    "or",
    "\\pi",
    "+",
    "^{2}",
    "Answer: ",
    "\nAnswer:",
    ":",
    "hours",
    "{",
)


def test_answers_read_from_the_end_are_those_of_the_plain_reading() -> None:
    """The plain reading goes through a text once from its beginning, and keeps nothing."""
    draw = random.Random(0)
    for _ in range(3000):
        pieces = draw.choices(_PIECES, k=draw.randrange(draw.choice([6, 12, 40, 200])))
        text = draw.choice(["", " "]).join(pieces)
        assert numeric_answer(text) == _plain_number(text), text
        words = list(answers._FLEXIBLE.finditer(text))
        assert flexible_extract(text) == (words[-1][0] if words else None), text
        for start in ("", text, f"{text} ", f"{text}\n"):
            both = f"{start}{draw.choice(['The', 'the', 'xthe'])} answer is {text[:40]}"
            expected = numeric_answer(both), flexible_extract(both)
            assert answers.numeric_and_flexible(both) == expected, both


def _plain_number(text: str) -> str | None:
    text = plain_digits(text)
    boxes = [found.start() for found in re.finditer(r"\\boxed\{", text)]
    first = 0
    ends = [*boxes[1:], *[len(text)] * bool(boxes)]
    for at, stop in reversed([*zip(boxes, ends, strict=True)]):
        end = answers._find_closing_brace(text, at + len(answers._BOXED), stop)
        if end and (found := answers._read_single_number(text[at : end + 1])):
            first, boxed = at, found
            break
    else:
        boxed = None
    for marker in (answers._STATED, answers._HASHES):
        stop = len(text)
        for place in reversed(list(marker.finditer(text))):
            if marker is answers._STATED and (
                place.start() < first
                or not answers._LED.search(text[max(place.start() - 24, 0) : place.start()])
                or is_hedged(text, place.start())
            ):
                stop = place.start()
                continue
            line = text.find("\n", place.end(), stop)
            own = text[place.start() : stop if line < 0 else line]
            number, end = answers._first_of(own, place.end() - place.start())
            if end:
                return number
            stop = place.start()
        if boxed:
            return boxed[0]
    if found := answers._answer_line(text):
        return found[0]
    every = [
        (line, found)
        for line in text.split("\n")
        for found in answers._iterate_asserted(line, 0, len(line))
    ]
    return result(every[-1][1][0]) if every and is_whole(*every[-1]) else None


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
        "9",
        "1,000,",
        "1,0000",
        ".",
        ",",
        "-",
        "$",
        "$-",
        "the ",
        "the answer is ",
        "####",
        "The answer is 1",
        "1e",
        "1e5",
        "= ",
        "1=",
        "1 =\n",
        " ",
        "\uff11",
        "1\uff11",
        "-1.5e-5 ",
        "#### ",
        "The answer is 1,000,000,",
        "a",
        "00,",
        "1 000 ",
        "1+",
        "(",
        "(1)",
        "9^",
        "1/2 ",
        "\\boxed{",
        "\\boxed{1",
        "\\boxed{1} ",
        "{",
        "}",
        "answer",
        "Answer: 1\n",
        "Answer:",
        "5 or ",
        "1, ",
        "2\\pi ",
        "if the answer is 1 ",
        "2 hours ",
        "^{2}",
        "\u00b2",
        "\\frac{1+1}{x}",
        "\\frac{",
        "1...",
        "+ ...",
        "20% of ",
        "not 5 ",
        "1 a a ",
        "1  x ",
        "\\frac{1}{2}",
        "1\\boxed{",
        "3 1/2",
        "1 x (((",
    ],
)
def test_reading_takes_linear_time(unit: str) -> None:
    """A quadratic reader needs many seconds; a linear one takes a fraction of one."""
    for text in (unit * (50_000 // len(unit)), "The answer is " + unit * (50_000 // len(unit))):
        start = time.process_time()
        GSM8K().score(Problem("p", "q", "18"), text)
        assert time.process_time() - start < 1


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
