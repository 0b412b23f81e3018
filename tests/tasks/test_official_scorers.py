"""Scores against the code that is published with the data, on the same outputs."""

import logging
import random
import re
from functools import cache
from typing import Any

import pytest
from math_outputs import aime_outputs, letter_outputs, math_outputs, some_answers

from treegen.evals.problem import Problem
from treegen.evals.statistics.estimators import pass_at_k
from treegen.evals.statistics.metrics import ReportOptions
from treegen.evals.statistics.votes import Tally
from treegen.evals.verdict import SampleScore, unify_answers
from treegen.tasks.answers import MathAnswer
from treegen.tasks.gpqa import GPQA
from treegen.tasks.math.competitions import AIME
from treegen.tasks.math.task import (
    Math,
    Math500,
    equivalent,
    extract_boxed,
    hendrycks_form,
    minerva_answer,
    minerva_form,
)

math_verify = pytest.importorskip("math_verify")
hendrycks: Any = pytest.importorskip("lm_eval.tasks.hendrycks_math.utils")
lm_eval_aime: Any = pytest.importorskip("lm_eval.tasks.aime.utils")
# simple-evals, common.py
MULTICHOICE = r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?"
# Of outputs that are drawn; math-verify takes some milliseconds for each.
AMOUNTS = pytest.mark.parametrize("num", [150, pytest.param(1000, marks=pytest.mark.soak)])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """No warnings that the time limits of math-verify are off; they would use pytest's signals."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


@cache
def parsed(text: str) -> Any:
    return math_verify.parse(text, parsing_timeout=None)


@cache
def math_verify_says(text: str, reference: str) -> bool:
    found = math_verify.verify(parsed(f"${reference}$"), parsed(text), timeout_seconds=None)
    return bool(found)


def problem(answer: str) -> Problem:
    return Problem("p", "?", answer)


@AMOUNTS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "outputs", "seed", "least"),
    [(AIME(), aime_outputs, 1, 0.3), (Math500(), math_outputs, 2, 0.2)],
    ids=["aime", "math500"],
)
def test_competitions_score_as_math_verify_and_lm_eval(
    task: Any, outputs: Any, seed: int, least: float, num: int
) -> None:
    right = 0
    for text, answer in outputs(num, seed=seed):
        verdicts = task.score(problem(answer), text)
        assert verdicts["math-verify"].correct == math_verify_says(text, answer), (text, answer)
        expected = lm_eval_aime.process_results({"answer": answer}, [text])["exact_match"]
        assert verdicts["hendrycks"].correct == bool(expected), (text, answer)
        right += verdicts["math-verify"].correct
    assert least * num < right < 0.7 * num


@pytest.mark.slow
def test_math_scores_as_minerva_in_lm_eval_but_for_what_math_verify_knows() -> None:
    minerva = minerva_of_lm_eval()
    equal = cache(minerva.is_equiv)
    filter, more = Math().answer_types["minerva"], set()
    for text, answer in math_outputs(300, seed=3):
        ours = filter.verdict(text, [answer]).correct
        found = minerva.normalize_final_answer(minerva.get_unnormalized_answer(text))
        if ours != equal(found, minerva.normalize_final_answer(answer)):
            # sympy's own parser reads no lists, no intervals, and no number that begins with 0. A
            # mixed number such as 3 1/2 is a product for it.
            form = minerva_form(minerva_answer(text) or "")
            assert ours == math_verify_says(f"${form}$", minerva_form(answer)), (text, answer)
            assert ours or answer == "3\\frac{1}{2}", (text, answer)
            more.add((form, answer))
    assert len(more) < 20


@pytest.mark.slow
def test_answers_are_the_same_where_math_verify_says_so_in_either_order() -> None:
    kind, draw = MathAnswer(), random.Random(6)
    more = ["y=x+1", "y=1+x", "y=2x", "2y=2x+2", "x+1", "1+x", "\\frac{x+1}{x-1}", "9", "9\\%", "x"]
    more += [
        "1+\\frac{2}{x-1}",
        "\\sqrt{x^2}",
        "|x|",
        "e^{i\\pi}",
        "-1",
        "0.333333",
        "\\frac{1}{3}",
    ]
    answers = [*some_answers(), *more]
    pairs = [(draw.choice(answers), draw.choice(answers)) for _ in range(100)]
    pairs += [(a, b) for a in more for b in more if a < b]
    same = 0
    for first, second in pairs:
        want = math_verify_says(f"${first}$", second) or math_verify_says(f"${second}$", first)
        assert kind.same(first, second) == (want or first == second), (first, second)
        same += want
    assert same > 10


def test_metrics_of_64_samples_follow_from_math_verifys_judgements() -> None:
    task, wanted = AIME(), "33"
    draw = random.Random(7)
    texts = [
        f"So \\boxed{{{draw.choice(['33', '033', '33.0', '24+9', '32', '16+16', '7', 'x'])}}}"
        for _ in range(64)
    ]
    right = [math_verify_says(text, wanted) for text in texts]
    # Classes by comparing with the first of each class: equality of numbers is transitive.
    votes: list[tuple[str, list[int]]] = []
    for number, text in enumerate(texts):
        answer = text.removeprefix("So \\boxed{").removesuffix("}")
        for first, members in votes:
            if math_verify_says(text, first):
                members.append(number)
                break
        else:
            votes.append((answer, [number]))
    found = [("p", task.score(problem(wanted), text)) for text in texts]
    scores = [
        SampleScore("p", number, "stop", verdicts)
        for number, verdicts in enumerate(unify_answers(found, task.answer_types))
    ]
    options = ReportOptions(problem_ids=["p"], num_samples=64, pass_ks=(1, 8), maj_ks=(1, 8, 64))
    report = task.aggregate(scores, options)
    share = sum(right) / 64
    assert report.value("exact_match", "math-verify") == share
    assert report.value("pass@1", "math-verify") == pytest.approx(share)
    assert report.value("pass@8", "math-verify") == pytest.approx(pass_at_k(64, sum(right), 8))
    majority = {row.k: row.value for row in report.majority if row.filter == "math-verify"}
    counts = sorted((len(members), right[members[0]]) for _, members in votes)
    tally = Tally(
        tuple(n for n, is_right in counts if is_right),
        tuple(n for n, is_right in counts if not is_right),
        0,
    )
    assert majority == {k: pytest.approx(tally.maj_at_k(k)) for k in (1, 8, 64)}
    assert majority[64] == 1.0 and 0.3 < share < 0.7


def test_gpqa_scores_as_simple_evals() -> None:
    task, right = GPQA(), 0
    for text, answer in letter_outputs(1000, seed=4):
        match = re.search(MULTICHOICE, text)
        expected = (match.group(1) if match else None) == answer
        assert task.score(problem(answer), text)["simple-evals"].correct == expected, (text, answer)
        right += expected
    assert 50 < right < 400


PIECES = (
    "\\frac",
    "\\dfrac",
    "\\sqrt",
    "{",
    "}",
    "1",
    "2",
    "10",
    "x",
    "=",
    " ",
    "/",
    ".",
    "\\text{ cm}",
    "\\text{m}",
    "\\left(",
    "\\right)",
    "\\$",
    "$",
    "\\%",
    "^\\circ",
    "\\boxed{",
    "\\boxed ",
    "0.5",
    "\\fbox{",
    "\n",
    "a ",
    "an ",
    "square",
    "ft",
    "cm",
    "\\!",
    "\\\\",
    ",",
    "1,000",
    "\\text{and}",
    "\\mbox{ways}",
    "\\pi",
    "-",
    "\\sqrt[3]",
    "\\ldots",
    "Final Answer: The final answer is",
    " I hope it is correct",
    ". I hope it is correct.",
    "\\textbf{",
    "\\overline{",
    "{,}",
    '"',
)


def test_forms_of_answers_are_those_of_lm_eval_on_any_text() -> None:
    minerva, draw = minerva_of_lm_eval(), random.Random(5)
    for _ in range(4000):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 9)))
        other = draw.choice([text + " ", "".join(draw.choices(PIECES, k=3))])
        assert extract_boxed(text) == boxed_of_lm_eval(text), text
        assert hendrycks_form(text) == form_of_lm_eval(text), text
        assert equivalent(text, other) == hendrycks.is_equiv(text, other), (text, other)
        assert minerva_form(text) == minerva.normalize_final_answer(text), text
        found = minerva_answer(text)
        assert ("[invalidanswer]" if found is None else found) == (
            minerva.get_unnormalized_answer(text)
        ), text


def minerva_of_lm_eval() -> Any:
    try:
        from lm_eval.tasks.minerva_math import utils
    except (AssertionError, ImportError):
        pytest.skip("lm-eval's minerva_math wants antlr4-python3-runtime 4.11")
    return utils


def boxed_of_lm_eval(text: str) -> str | None:
    found = hendrycks.last_boxed_only_string(text)
    try:
        return None if found is None else str(hendrycks.remove_boxed(found))
    except AssertionError:
        return None


def form_of_lm_eval(text: str) -> str | None:
    try:
        return str(hendrycks.strip_string(text))
    except Exception:
        return None
