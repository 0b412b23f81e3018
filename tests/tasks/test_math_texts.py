r"""What is read of texts as mathematics, as models write them, and what it equals."""

from pathlib import Path

import pytest
from cli_cases import write_jsonl

from treegen.tasks import TaskOptions
from treegen.tasks.answers import MathAnswer
from treegen.tasks.answers.maths import without_dollars
from treegen.tasks.math.competitions import HMMT

pytest.importorskip("math_verify")

EQUAL = {
    "15": ["15", "15.0", "15 \\text{ apples}", "\\text{15}", "x = 15", "30/2", "\\$15", "+15"],
    "1000": ["1000", "1,000", "1{,}000", "10^3", "10^{3}", "1 \\times 10^{3}"],
    "0.5": ["0.5", ".5", "1/2", "\\frac12", "\\frac{1}{2}", "\\dfrac{1}{2}", "\\tfrac12", "0.50"],
    "\\frac{3}{4}": ["3/4", "0.75", "\\frac{3}{4}", "\\dfrac{6}{8}", "x=\\frac34"],
    "-2": ["-2", "-2.0", "-\\frac{4}{2}", "x=-2"],
    "25\\%": ["25\\%", "25"],
    "2\\pi": ["2\\pi", "2 \\pi", "\\pi\\cdot 2", "2\\times\\pi"],
    "3\\sqrt{2}": ["3\\sqrt{2}", "3\\sqrt2", "\\sqrt{18}", "3 \\cdot \\sqrt{2}"],
    "\\sqrt{16}": ["4", "\\sqrt{16}", "2^2"],
    "120": ["5!", "120", "5\\cdot 4\\cdot 3\\cdot 2"],
    "1024": ["2^{10}", "1024", "2^10", "4^5"],
    "2000": ["2 \\times 10^{3}", "2000", "2\\cdot 10^3"],
    "55": ["55", "1+2+3+4+5+6+7+8+9+10"],
    "x^2+1": ["x^2+1", "1+x^2", "x^{2}+1"],
    "(1, 2)": ["(1, 2)", "(1,2)", "\\left(1, 2\\right)"],
    "\\{1, 2\\}": ["\\{1, 2\\}", "\\{2, 1\\}", "1, 2", "2,1"],
    "[0, 1)": ["[0, 1)", "\\left[0, 1\\right)"],
    "x=3": ["x=3", "3", "x = 3"],
    "\\text{B}": ["B", "\\text{B}", "\\textbf{B}", "\\text{(B)}"],
    "90^\\circ": ["90^\\circ", "90^{\\circ}", "90"],
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": ["\\begin{pmatrix}1\\\\2\\end{pmatrix}"],
}
# What math-verify takes for other answers than a reader would.
OFFICIAL = {
    "15": ["15."],
    "1000": ["1\\,000", "1e3"],
    "25\\%": ["25%", "0.25"],
    "x^2+1": ["(x+i)(x-i)"],
    "-2": ["\\minus 2"],
}
DIFFERENT = {
    "15": [
        "16",
        "150",
        "-15",
        "1.5",
        "15x",
        "15^2",
        "15\\pi",
        "\\sqrt{15}",
        "(15, 16)",
        "15!",
        "x",
    ],
    "1000": ["1", "100", "1,00", "10^2", "10", "3"],
    "0.5": ["5", "1", "2", "\\frac{1}{3}", "0.55", "1/20"],
    "2": ["2\\pi", "2^{10}", "2\\sqrt{3}", "\\frac{2}{3}", "2:3", "(2, 3)"],
    "\\frac{3}{4}": ["3", "4", "\\frac{4}{3}", "34"],
    "2\\pi": ["2", "\\pi", "6.28"],
    "x^2+1": ["x^2", "x^2-1", "y^2+1", "1"],
    "(1, 2)": ["(2, 1)", "1", "(1, 2, 3)", "1.2"],
    "\\{1, 2\\}": ["\\{1, 2, 3\\}", "1"],
    "[0, 1)": ["[0, 1]", "(0, 1)"],
}
TEXTS = (
    ("The answer is $15$.", "15", True),
    ("The answer is 15.", "15", True),
    ("The final answer is $\\boxed{15}$.", "15", True),
    ("\\boxed{15} which is 3 more than 12", "15", True),
    # math-verify makes one answer of all boxes.
    ("\\boxed{3}, then \\boxed{15}", "15", False),
    ("\\boxed{3}, then \\boxed{15}", "\\{3, 15\\}", True),
    ("<think>\\boxed{3}</think>\\boxed{15}", "15", False),
    ("It costs \\$15.", "15", False),
    ("First $3$. So $12 + 3 = 15$.", "15", True),
    ("Thus $1 + 2 + \\dots + 10 = 55$.", "55", True),
    ("So $x = 15$", "15", True),
    ("So x = 15", "15", True),
    ("$$15$$", "15", True),
    ("\\[15\\]", "15", True),
    ("\\(15\\)", "15", True),
    ("**15**", "15", True),
    ("15 apples", "15", True),
    ("It costs $15.", "15", True),
    ("Answer: 15", "15", True),
    ("**Answer:** $15$", "15", True),
    ("Final Answer: The final answer is $15$. I hope it is correct.", "15", True),
    ("The answer is $\\frac{1}{2}$.", "0.5", True),
    ("The answer is 1/2.", "0.5", True),
    ("The answer is $2 \\times 10^{3}$.", "2000", True),
    ("The answer is $2^{10}$.", "1024", True),
    ("The answer is $2^{10}$.", "2", False),
    ("The answer is $2\\pi$.", "2", False),
    ("The answer is $2\\pi$.", "2\\pi", True),
    ("The answer is $10^{6}$", "10", False),
    ("The answer is $10^{6}$", "1000000", True),
    ("The answer is 1,000.", "1000", True),
    ("<think>$3$</think>The answer is $15$.", "15", True),
    ("I do not know.", "15", False),
    ("", "15", False),
    ("\\boxed{}", "15", False),
    ("The answer is $15", "15", True),
)
BOXED = [
    (f"Thus $\\boxed{{{answer}}}$.", reference, is_right)
    for table, is_right in ((EQUAL, True), (DIFFERENT, False), (OFFICIAL, False))
    for reference, answers in table.items()
    for answer in answers
]


@pytest.fixture(scope="module")
def kind() -> MathAnswer:
    return MathAnswer()


def test_the_table_is_long() -> None:
    assert len({text for text, _, _ in (*TEXTS, *BOXED)}) >= 150


@pytest.mark.parametrize(("text", "reference", "is_right"), (*TEXTS, *BOXED))
def test_mathematics_in_model_text(
    kind: MathAnswer, text: str, reference: str, is_right: bool
) -> None:
    found = kind.verdict(text, [reference])
    assert found.correct is is_right, found
    assert kind.verdict(text, [f"${reference}$"]) == found


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("$x$", "x"),
        ("$$x$$", "x"),
        (" $x$ ", "x"),
        ("\\(x\\)", "x"),
        ("\\[x\\]", "x"),
        ("$5", "5"),
        ("\\$5", "\\$5"),
        ("$\\$5$", "\\$5"),
        ("5\\$", "5\\$"),
        ("$5\\$", "5\\$"),
        ("$1$ and $2$", "$1$ and $2$"),
        ("x", "x"),
        ("", ""),
        ("$$", "$$"),
    ],
)
def test_dollar_signs_around_a_reference_are_taken_off(answer: str, bare: str) -> None:
    assert without_dollars(answer) == bare


def test_hmmt_takes_references_with_dollar_signs(tmp_path: Path) -> None:
    rows = [
        {"problem": "How many?", "answer": "$8\\sqrt{10}$"},
        {"problem": "?", "answer": "$$5$$"},
    ]
    path = write_jsonl(tmp_path / "hmmt.jsonl", rows)
    task = HMMT()
    problems = task.load(TaskOptions(data=str(path))).problems
    assert [problem.answer for problem in problems] == ["8\\sqrt{10}", "5"]
    for problem, text in zip(problems, ("\\boxed{8\\sqrt{10}}", "\\boxed{5}"), strict=True):
        assert all(verdict.correct for verdict in task.score(problem, text).values())
