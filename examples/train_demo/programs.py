"""Small programming problems: read something, change it in one to five steps, print the outcome.

Every step is one of the `operations`. They are put together freely; which ones follow each other in
a problem, whatever its constants are, decides whether it is trained on or reserved, so those that
are reserved ask for combinations never seen. A step may also be hidden: the question does not tell
it and the examples show it, so that it has to be guessed.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from train_demo.held_out import reserved
from train_demo.operations import (
    NUMBER_ENDS,
    NUMBER_STEPS,
    VOWELS,
    WORD_ENDS,
    WORD_STEPS,
    Operation,
)

MAX_STEPS: Final = 5
EXAMPLES: Final = 2

_HIDDEN: Final = (
    "make the change that the examples show",
    "do one more thing, which you have to find out from the examples",
)
_LETTERS: Final = "abcdefghijklmnoprstuvwyz"
_SYLLABLES: Final = tuple(a + b for a in "bdfgklmnprst" for b in VOWELS)


@dataclass(frozen=True, slots=True)
class Form:
    """What a problem reads: how that is told, programmed and drawn."""

    name: str
    opening: tuple[str, ...]
    layout: str
    variables: tuple[str, ...]
    programs: tuple[str, ...]
    steps: tuple[Operation, ...]
    ends: tuple[Operation, ...]
    draw: Callable[[random.Random], Any]
    write: Callable[[Any], str]


def _some_numbers(draw: random.Random) -> list[int]:
    low = draw.choice((-9, -9, -30, 0, 1))
    return [draw.randint(low, draw.choice((9, 30, 60))) for _ in range(draw.randint(1, 9))]


def _some_word(draw: random.Random) -> str:
    if draw.random() < 0.2:
        return "".join(draw.choice("abcde") for _ in range(draw.randint(1, 8)))
    word = "".join(draw.choice(_SYLLABLES) for _ in range(draw.randint(1, 4)))
    return word + (draw.choice(_LETTERS) if draw.random() < 0.5 else "")


FORMS: Final = (
    Form(
        "numbers",
        ("Read a list of numbers.", "You are given N integers.", "There is a list of integers."),
        "The first line holds N (1 <= N <= 100). The second line holds N integers.",
        ("numbers", "a", "values"),
        (
            "n = int(input())\n{v} = list(map(int, input().split()))",
            "input()\n{v} = [int(x) for x in input().split()]",
        ),
        NUMBER_STEPS,
        NUMBER_ENDS,
        _some_numbers,
        lambda values: f"{len(values)}\n{' '.join(map(str, values))}\n",
    ),
    Form(
        "word",
        ("Read a word.", "You are given a word.", "There is a word of small letters."),
        "One line with a word of small letters.",
        ("word", "s", "text"),
        ("{v} = input()", "{v} = input().strip()"),
        WORD_STEPS,
        WORD_ENDS,
        _some_word,
        lambda word: f"{word}\n",
    ),
)


@dataclass(frozen=True, slots=True)
class Program:
    """A problem with a solution and tests, inputs and outputs in full."""

    question: str
    solution: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_steps: int
    num_hidden: int
    key: str

    @property
    def difficulty(self) -> str:
        """As APPS names it: all is told; one step has to be found out; more than that."""
        if not self.num_hidden:
            return "introductory"
        return "interview" if self.num_steps == 1 else "competition"

    def row(self, number: int) -> dict[str, Any]:
        """Return the problem as a row of APPS."""
        tests = {"inputs": list(self.inputs), "outputs": list(self.outputs)}
        return {
            "problem_id": number,
            "question": self.question,
            "solutions": json.dumps([self.solution]),
            "input_output": json.dumps(tests),
            "difficulty": self.difficulty,
            "url": "",
            "starter_code": "",
        }


def program(
    draw: random.Random,
    num_steps: int,
    num_hidden: int = 0,
    *,
    num_tests: int = EXAMPLES,
    evaluation: bool = False,
) -> Program:
    """Draw a problem of 0 to MAX_STEPS steps before the last one: to train on, or reserved.

    Args:
        num_hidden: Of how many steps the question says nothing; they show in the examples only.
    """
    while True:
        form = draw.choice(FORMS)
        chain = draw.sample(form.steps, num_steps)
        end = draw.choice(form.ends)
        key = " > ".join([form.name, *(step.name for step in chain), end.name])
        # Of no or one step there are so few that all of them are trained on, with other constants.
        if num_steps < 2 or reserved(key) == evaluation:
            problem = _program(draw, form, chain, end, num_hidden, num_tests, key)
            if num_steps > 1 or reserved(problem.question) == evaluation:
                return problem


def _program(
    draw: random.Random,
    form: Form,
    chain: Sequence[Operation],
    end: Operation,
    num_hidden: int,
    num_tests: int,
    key: str,
) -> Program:
    variable = draw.choice(form.variables)
    constants = [draw.randint(*(step.constants or (0, 0))) for step in (*chain, end)]
    hidden = set(draw.sample(range(len(chain)), num_hidden))

    def filled(texts: Sequence[str], k: int) -> str:
        return draw.choice(texts).replace("{k}", str(k)).replace("{v}", variable)

    sentences = [
        draw.choice(_HIDDEN) if number in hidden else filled(step.texts, constants[number])
        for number, step in enumerate(chain)
    ]
    question = " ".join([draw.choice(form.opening), *_sentences(draw, sentences)])
    question += f" {'Then print' if sentences else 'Print'} {filled(end.texts, constants[-1])}."
    lines = [draw.choice(form.programs).replace("{v}", variable)]
    lines += [filled(step.programs, k) for step, k in zip(chain, constants, strict=False)]
    lines.append(f"print({filled(end.programs, constants[-1])})\n")

    tests: dict[str, str] = {}
    while len(tests) < num_tests:
        value = form.draw(draw)
        stdin = form.write(value)
        for step, k in zip((*chain, end), constants, strict=True):
            value = step.run(value, k)
        tests[stdin] = f"{value}\n"
    examples = [f"Input\n{stdin}\nOutput\n{out}" for stdin, out in islice(tests.items(), EXAMPLES)]
    question += (
        f"\n\n-----Input-----\n\n{form.layout}\n\n-----Output-----\n\n{_printed(end)}"
        "\n\n-----Examples-----\n\n"
    ) + "\n".join(examples)
    return Program(
        question, "\n".join(lines), tuple(tests), tuple(tests.values()), len(chain), num_hidden, key
    )


def _sentences(draw: random.Random, sentences: Sequence[str]) -> list[str]:
    later = ("Then", "Next", "After that")
    return [
        f"{'First' if number == 0 and len(sentences) > 1 else draw.choice(later)} {text}."
        for number, text in enumerate(sentences)
    ]


def _printed(end: Operation) -> str:
    if end.name in ("contains", "rising", "palindrome"):
        return "YES or NO."
    texts = ("list", "lines", "word", "spelled", "dashes")
    return "What is asked for." if end.name in texts else "One integer."
