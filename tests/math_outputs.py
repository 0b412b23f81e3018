"""Made-up outputs of a model on problems of mathematics: right, wrong, odd and unreadable ones."""

import random
from collections.abc import Iterator

# A reference, other ways to write it, and answers that are not it.
_ANSWERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("204", ("204", "204.0", "0204", "\\text{204}", "204\\text{ cm}", "200+4"), ("203", "-204")),
    ("\\frac{1}{2}", ("\\frac12", "\\dfrac{1}{2}", "0.5", "1/2", "\\frac{2}{4}", "50\\%"), ("2",)),
    ("-\\frac{2}{3}", ("-2/3", "\\frac{-2}{3}", "-\\tfrac{2}{3}"), ("\\frac{2}{3}", "-0.66")),
    ("3\\sqrt{5}", ("\\sqrt{45}", "3 \\sqrt5", "3\\cdot\\sqrt{5}"), ("5\\sqrt{3}", "6.708")),
    ("25\\pi", ("25 \\pi", "\\pi\\cdot 25", "25\\pi\\text{ square units}"), ("25", "78.54")),
    ("(-\\infty,3]", ("(-\\infty, 3]", "x\\le 3", "\\left(-\\infty,3\\right]"), ("(-\\infty,3)",)),
    ("2,3", ("3,2", "2, 3", "\\{2,3\\}", "x=2\\text{ or }x=3"), ("2", "2,4", "(2,3)")),
    ("2x^2+7x-15", ("(2x-3)(x+5)", "7x+2x^2-15", "2x^{2}+7x-15"), ("2x^2+7x+15", "x")),
    ("202_7", ("202_7", "202_{7}"), ("202", "100")),
    ("\\text{(C)}", ("C", "\\text{C}", "(C)"), ("D", "\\text{B}")),
    ("\\begin{pmatrix}6\\\\3\\end{pmatrix}", ("\\begin{pmatrix} 6 \\\\ 3 \\end{pmatrix}",), ("6",)),
    ("90^\\circ", ("90", "90^{\\circ}", "90\\text{ degrees}"), ("45^\\circ", "\\frac{\\pi}{2}")),
    ("1,234", ("1234", "1{,}234", "1,234"), ("1.234", "234")),
    ("x=5", ("5", "x=5", "5=x"), ("x=6", "y=5")),
    ("(3,\\frac{\\pi}{2})", ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)"), ("(3,\\pi)",)),
    ("0", ("0", "0.0", "-0"), ("1", "\\emptyset")),
    ("\\$18.90", ("\\$18.90", "18.90", "18.9"), ("\\$18.09",)),
    ("\\text{June 20}", ("\\text{June 20}", "\\text{june 20}"), ("\\text{\\$20 each}",)),
    ("3\\frac{1}{2}", ("\\frac72", "3.5", "3 \\frac{1}{2}"), ("\\frac{3}{2}",)),
    ("6-5i", ("6 - 5i", "-5i+6"), ("6+5i", "0.\\overline{3}")),
    ("\\pm 3", ("\\pm 3", "3,-3", "-3, 3"), ("3",)),
)

_SHAPES = (
    "So the answer is $\\boxed{%s}$.",
    "\\boxed{%s}",
    "We get \\[ \\boxed{%s} \\]",
    "First $\\boxed{7}$, no: $\\boxed{%s}$",
    "The answer is $%s$.",
    "Hence the final answer is $%s$. I hope it is correct.",
    "Steps.\nFinal Answer: The final answer is $%s$. I hope it is correct.",
    "Final Answer: The final answer is $%s$.",
    "The answer is %s",
    "$x = %s$",
    "It follows that %s, as was asked.",
    "**Answer:** %s\n",
    "Let $n=3$. Then\n\n$$%s$$",
    "\\boxed %s$ and more",
    "\\fbox{%s}",
    "\\boxed{%s",
    "= %s",
)

_UNREADABLE = ("", " \n", "I do not know.", "$", "\\boxed{}", "$$$$", "\\frac{", "}{", "\\boxed")


def some_answers() -> list[str]:
    """Return answers, right and wrong ones, of many kinds."""
    return [answer for _, same, other in _ANSWERS for answer in (*same, *other)]


def math_outputs(num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of an output and the reference of its problem."""
    draw = random.Random(seed)
    for _ in range(num):
        reference, same, other = draw.choice(_ANSWERS)
        kind = draw.random()
        if kind < 0.05:
            yield draw.choice(_UNREADABLE), reference
            continue
        answers = same if kind < 0.55 else other if kind < 0.9 else draw.choice(_ANSWERS)[1]
        yield draw.choice(_SHAPES).replace("%s", draw.choice(answers)), reference


def aime_outputs(num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of an output and a reference, integers from 0 to 999."""
    draw = random.Random(seed)
    for _ in range(num):
        wanted = draw.randrange(1000)
        given = wanted if draw.random() < 0.6 else draw.randrange(1000)
        forms = (f"{given}", f"{given:03}", f"{given}.0", f"{given}^\\circ", f"{given - 9}+9")
        text = (
            "" if draw.random() < 0.03 else draw.choice(_SHAPES).replace("%s", draw.choice(forms))
        )
        yield text, str(wanted)


def letter_outputs(num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of an output and a letter."""
    draw = random.Random(seed)
    shapes = (
        "Answer: %s",
        "answer: %s.",
        "Thinking.\nAnswer: $%s$",
        "**Answer: %s**",
        "Answer : (%s)",
        "Answer:%s\nAnswer: B",
        "The answer is %s",
        "ANSWER:\t%s",
        "Answer: $LETTER",
        "Answer:\n%s",
        "\\boxed{%s}",
        "%s",
        "Answer: %s because",
        "answer:: %s",
        "Answer: none",
    )
    for _ in range(num):
        letter = draw.choice("ABCDabcdE")
        yield draw.choice(shapes).replace("%s", letter), draw.choice("ABCD")
