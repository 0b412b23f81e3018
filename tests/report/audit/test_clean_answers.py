r"""Answers in forms that models use, with the right verdicts: the audit must find nothing severe.

Each case was read by hand. An answer whose value depends on the reader, such as 50% and 0.5, is
clean under either verdict.
"""

from pathlib import Path

import pytest
from audit_cases import import_run

from treegen.report.audit.answers import references_of
from treegen.report.audit.audit import audit_run
from treegen.report.audit.equivalence import MATH_RULES, compare, limit_time
from treegen.report.audit.findings import Audit
from treegen.report.audit.readers import (
    CHOICE_RULES,
    NUMBER_RULES,
    choices_of,
    is_same_number,
    value_of,
)

_SUM = "We add what the first two boxes hold to what the third one holds."
_GAS = "Which gas do plants take in?\nA) oxygen\nB) carbon dioxide\nC) helium\nD) neon"
_GAS_DE = "Welches Gas nehmen Pflanzen auf?\nA) Sauerstoff\nB) Kohlendioxid\nC) Helium\nD) Neon"
_GAS_ZH = "植物吸收哪种气体\uff1f\nA) 氧气\nB) 二氧化碳\nC) 氦气\nD) 氖气"


def _severe(audit: Audit) -> set[str]:
    return {f.kind for f in audit.findings if f.severity != "low"}


def _audit(folder: Path, question: str, gold: str, text: str, answer: str) -> Audit:
    sample = (text, answer.removeprefix("!"), not answer.startswith("!"))
    return audit_run(import_run(folder, [(question, gold)], [[sample]]))


@pytest.mark.parametrize(
    ("gold", "text", "answer"),  # "!" marks a verdict of False
    [
        ("18", "<answer>18</answer>", "18"),
        ("18", f"{_SUM}\n<answer>\n18\n</answer>", "18"),
        ("18", f'{{"reasoning": "{_SUM}", "answer": 18}}', "18"),
        ("18", f'```json\n{{"thought": "{_SUM}", "final_answer": "18"}}\n```', "18"),
        ("18", "Wir addieren 9 und 9 und erhalten das Ergebnis. Die Antwort ist 18.", "18"),
        ("18", "Nous additionnons 9 et 9 pour les deux boîtes. La réponse est 18.", "18"),
        ("18", "我们把两个盒子里的苹果加起来\uff0c一共有十八个苹果。答案是18。", "18"),
        ("18", f"{_SUM} That gives us **18 apples** in the box.", "18"),
        ("18", f"{_SUM}\n\n18 apples", "18"),
        ("18", "The answer is 9 + 9 = 18 apples (3 boxes of 6).", "18"),
        ("18", "The answer is that we need 20 - 2, i.e. **18**.", "18"),
        ("18", "The answer is 18 or 20.", "!20"),
        ("18", "The answer is between 16 and 18.", "!16"),
        ("18", "So the box holds 5 bags, and the shop has many more boxes (18)", "!5"),
        ("18", "I think that the answer is 17 to 18.", "!17"),
        ("18", r"Hence \boxed{18\text{ apples}}.", "18"),
        ("0.5", "The answer is 50%.", "50%"),
        ("0.5", "The answer is 50%.", "!50%"),
        ("0.5", r"Half of them, so \boxed{.5}", ".5"),
        ("5", r"Half of them, so \boxed{.5}", "!.5"),
        ("2000000", "The answer is 2 million.", "2 million"),
        ("2000000", "Die Antwort ist 2 Millionen.", "2000000"),
        ("1234.5", "The answer is 1 234,5.", "1234.5"),
        ("1234", "Die Antwort ist 1.234.", "1234"),
        ("12", "The answer is 1 2.", "!1"),
        ("0.667", r"The share is \boxed{\frac{2}{3}}", "2/3"),
        ("-5", "It loses value. Answer: $5", "-5"),
        ("10000", r"There are \boxed{10,\!000} of them.", "10000"),
    ],
)
def test_numbers(gold: str, text: str, answer: str, tmp_path: Path) -> None:
    audit = _audit(tmp_path, "How many apples are left in the box?", gold, text, answer)
    assert audit.answers == "number" and not _severe(audit) - {"other-language"}, str(audit)


@pytest.mark.parametrize(
    ("question", "gold", "text", "answer"),
    [
        (_GAS, "B", "Plants take in this gas in order to grow. <answer>B</answer>", "B"),
        (_GAS, "B", '{"reasoning": "They need it in order to grow.", "answer": "B"}', "B"),
        (_GAS, "B", "They take it in so as to grow, and so it must be **B**", "B"),
        (_GAS, "B", "Of those named above, plants need option B in order to grow.", "B"),
        (_GAS, "B", "Plants take in carbon dioxide in order to grow.", "B"),
        (_GAS, "D", "They take in neon.", "!D"),
        (_GAS, "B", "Answer: A or B", "!A"),
        (_GAS, "B", "The answer is A and B.", "B"),
        (_GAS, "B", "Any of these may be (right).", "!("),
        (_GAS_DE, "B", "Pflanzen nehmen es auf.\nAntwort: B", "B"),
        (_GAS_DE, "B", "Pflanzen nehmen es auf.\nAntwort:\n\nAntwort: A", "!A"),
        (_GAS_DE, "B", "Die richtige Antwort ist **B**, denn Pflanzen nehmen es auf.", "B"),
        (_GAS_ZH, "B", "植物在光合作用中吸收这种气体\uff0c所以应该选择第二个。答案\uff1aB", "B"),
        (_GAS_ZH, "B", "植物在光合作用中吸收这种气体\uff0c所以正确答案是\uff08B\uff09。", "B"),
        ("Which gas do plants take in?", "B", "The gas is carbon dioxide.", "B"),
        ("Which gas do plants take in?", "D", "It dissolves in cold water.", "D"),
        ("Take the last letter of each word: 'banana'", "A", '{"answer": "A"}', "A"),
        ("Which?\nA.\noxygen\nB.\ncarbon dioxide\nC.\nhelium", "B", "Answer: B", "B"),
        (
            "Which program?\nA) def f(x):\n    return 1\nB) def f(x):\n    return 2",
            "B",
            "Answer: B",
            "B",
        ),
    ],
)
def test_letters(question: str, gold: str, text: str, answer: str, tmp_path: Path) -> None:
    audit = _audit(tmp_path, question, gold, text, answer)
    assert audit.answers == "choice" and not _severe(audit), str(audit)


@pytest.mark.parametrize(
    ("gold", "text", "answer"),
    [
        (r"\text{even}", r"\boxed{\text{odd}}", "!odd"),
        (r"\text{(A)}", r"\boxed{\text{(B)}}", "!(B)"),
        (r"5\text{ cm}", r"\boxed{5\text{ m}}", "!5 m"),
        (r"5\text{ cm}", r"\boxed{5}", "5"),
        (r"137 \frac{1}{2}", r"\boxed{137.5}", "137.5"),
        (r"\$[0,100]", r"\boxed{(0,100)}", "!(0,100)"),
        (r"\$x=5", r"\boxed{y=5}", "!5"),
        (r"\pi", r"\boxed{3.14159}", "!3.14159"),
        (r"\pi", r"\boxed{3.14}", "3.14"),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{0.707}", "0.707"),
        (r"\text{Monday}", r"\boxed{\text{Friday}}", "!friday"),
        (r"1 \, \text{or} \, 2", r"\boxed{12}", "!12"),
    ],
)
def test_formulas(gold: str, text: str, answer: str, tmp_path: Path) -> None:
    audit = _audit(tmp_path, "Compute it.", gold, f"{_SUM} Hence ${text}$.", answer)
    assert audit.answers == "mathematics" and not _severe(audit), str(audit)


@pytest.mark.parametrize(
    ("gold", "text"), [("C#", "C"), ("-2x", "2x"), ("US", "us"), ("The Who", "Who?")]
)
def test_short_texts(gold: str, text: str, tmp_path: Path) -> None:
    audit = _audit(tmp_path, "Name it.", gold, text, f"!{text}")
    assert audit.answers == "text" and not _severe(audit), str(audit)


def test_a_text_that_marks_no_answer_is_decided_by_a_fallback(tmp_path: Path) -> None:
    text = "Nine pears lie beside 18 of the green apples, which nobody has counted until today"
    audit = _audit(tmp_path, "How many apples are left?", "18", text, "18")
    assert _severe(audit) == {"decided-by-fallback"}
    assert audit.count("high") == 0


def test_a_word_is_no_letter_beyond_the_choices(tmp_path: Path) -> None:
    audit = _audit(tmp_path, _GAS, "B", "I think that plants take in oxygen.", "!I")
    assert "letter-is-a-word" in _severe(audit)


def test_a_text_that_writes_a_question_has_one_problem(tmp_path: Path) -> None:
    text = "Here is one; its answer is 3.\nQuestion: how many apples are left?"
    audit = _audit(tmp_path, "Write a question about apples.", text, text, text)
    assert "runs-into-next-problem" not in _severe(audit)


def test_values() -> None:
    values = {".5": 0.5, "$.75": 0.75, "1,000": 1000, "5\\,000": 5000, "18,": 18, "(3)": 3}
    assert {text: value_of(text) for text in values} == values
    for text in ("1 2", "1 1/2", r"5\frac{1}{2}", "(0,100)", "[0,100]", "(1,000)", "3,5", "0,100"):
        assert value_of(text) is None, text
    assert is_same_number("711", "11") is False and is_same_number("50%", "0.5") is None
    assert is_same_number("3.33", "10/3") is None and is_same_number("1000", "1001") is False


def test_choices_end_at_the_next_letter() -> None:
    text = "Which?\nA. def f():\n  return 1\nB. def f():\n  return 2\n\nThink first.\nAnswer:"
    assert choices_of(text) == {"A": "def f():\n  return 1", "B": "def f():\n  return 2"}
    assert choices_of("Which?\nA) x\nB) y\nAnswer:") == {"A": "x", "B": "y"}
    assert choices_of("Which?\nB) x\nA) y") == choices_of("A. Lincoln was born when?") == {}


def test_deeply_nested_references_are_texts(tmp_path: Path) -> None:
    assert references_of("[" * 100_000) == ("[" * 100_000,)


def test_formulas_that_differ_somewhere_differ() -> None:
    assert compare("x^2+1", "(x+1)^2") == (None, False)
    assert compare(r"\sqrt{2}", r"\sqrt{3}") == (False, False)


def test_slow_comparisons_have_a_total_limit() -> None:
    with limit_time(0) as limit:
        assert compare(r"\sqrt{11}", r"\sqrt{13}") == (None, None)
    assert limit.num_left_out == 1 and "1 comparisons of formulas" in limit.notices[0]
    assert compare(r"\sqrt{11}", r"\sqrt{13}") == (False, False)
    with limit_time() as limit:
        assert compare(r"\sqrt{11}", r"\sqrt{17}") == (False, False)
    assert not limit.notices


def test_flexible_extract_reads_and_compares_as_lm_eval_does() -> None:
    extraction = pytest.importorskip("lm_eval.filters.extraction")
    exact_match = pytest.importorskip("lm_eval.api.metrics").exact_match_hf_evaluate
    pattern = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
    reader = extraction.RegexFilter(regex_pattern=pattern, group_select=-1, fallback="[invalid]")
    (rule,) = [rule for rule in NUMBER_RULES if rule.name == "flexible-extract"]
    for text in ("It costs $1,200.", "So 3 - -4 = 7", "Nothing.", "1.5.2, or 18..", "#### -5\n"):
        ((wanted,),) = reader.apply([[text]], [{}])
        assert (rule.read(text) or "[invalid]") == wanted
        for gold in ("1200", "7", "18", "#### -5", "1.5.2"):
            expected = exact_match(
                predictions=[wanted],
                references=[gold],
                regexes_to_ignore=[",", r"\$", "(?s).*#### ", r"\.$"],
                ignore_case=True,
            )["exact_match"]
            assert rule.is_right(wanted, gold) == bool(expected)


def test_other_rules_claim_no_more_than_likeness() -> None:
    sources = {rule.source for rule in (*NUMBER_RULES, *CHOICE_RULES, *MATH_RULES)}
    assert all(s.startswith("like ") for s in sources - {"treegen", "sympy"})
