"""Training documents: many solved problems of a kind in a row, in the form of a task's own prompts.

A document is a list of parts. What a model would have to write counts in full; the prompts between
are only read. Parts begin and end where the tokenizer splits anyway, so that they
can be tokenized one by one.
"""

import json
import random
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from train_demo import needles, programs, puzzles, words
from treegen.tasks.apps.task import ask
from treegen.tasks.puzzles.puzzle import SOLVE_HEADER, VALUE_HEADER, solve_head, value_head


class Part(NamedTuple):
    """A piece of a document.

    weight: what the loss of each of its tokens counts. smooth: its digits are learned with label
    smoothing.
    """

    text: str
    weight: float
    smooth: bool = False


Document = list[Part]

READ: Final = 0.05  # what a model only has to read
WRITE: Final = 1.0
JUDGE: Final = 5.0  # one word, among many that are read
FACT: Final = 20.0


def with_tabs(solution: str) -> str:
    """Return a program indented by tabs, as the apps task shows solutions."""
    return solution.replace("    ", "\t")


@cache
def _bundled(name: str) -> tuple[dict[str, str], ...]:
    """Return the few-shot examples that come with the tasks."""
    text = files("treegen.tasks").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines() if line.strip())


def word_document(draw: random.Random) -> Document:
    """Questions and answers, at times led by the examples that come with the gsm8k task."""
    parts: Document = []
    between = "\n" if draw.random() < 0.1 else " "
    if draw.random() < 0.15:
        examples = _bundled("gsm8k_fewshot.jsonl")
        for row in draw.sample(examples, draw.randint(1, len(examples))):
            parts += [
                Part(f"Q: {row['question']}\nA:", READ),
                Part(f" {row['target']}\n\n", WRITE, smooth=True),
            ]
    (high,) = draw.choices(range(words.LEVELS), (2, 4, 5, 4, 2, 1))
    low = draw.choice((0, high))
    for _ in range(draw.randint(1, 10)):
        problem = words.word_problem(draw, draw.randint(low, high))
        parts.append(Part(f"Q: {problem.question}\nA:", READ))
        parts.append(Part(f" {problem.target(between)}\n\n", WRITE, smooth=True))
    return parts


def program_document(draw: random.Random) -> Document:
    """Programming problems with solutions, at times led by one that comes with the apps task."""
    questions, solved = [], []
    if draw.random() < 0.15:
        rows = [row for row in _bundled("apps_fewshot.jsonl") if not row["starter_code"]]
        for row in draw.sample(rows, draw.randint(1, len(rows))):
            questions.append(row["question"])
            solved.append(json.loads(row["solutions"])[0])
    for _ in range(draw.randint(1, 5)):
        (steps,) = draw.choices(range(programs.MAX_STEPS + 1), (1, 4, 4, 3, 2, 1))
        hidden = draw.choices((0, 1, 2), (4, 4, 1))[0]
        problem = programs.program(draw, steps, min(hidden, steps))
        questions.append(problem.question)
        solved.append(problem.solution)
    heading, _, _ = ask("|", "", calls=False, form="train").partition("|")
    parts: Document = [Part(heading, READ)]
    for number, (question, solution) in enumerate(zip(questions, solved, strict=True), start=1):
        prompt = ask(question, "", calls=False, form="train")
        parts.append(Part(prompt.removeprefix(heading), READ))
        # The heading of the next one is where a sample ends.
        more = heading if number < len(questions) else ""
        parts.append(Part(with_tabs(solution) + more, WRITE))
    return parts


def solve_document(draw: random.Random) -> Document:
    """Puzzles with the steps of a solution."""
    parts: Document = [Part(f"{SOLVE_HEADER}\n\n", READ)]
    for _ in range(draw.randint(1, 9)):
        puzzle = puzzles.puzzle(draw, draw.choice((3, 4, 4, 4)))
        parts.append(Part(solve_head(puzzle.numbers, puzzle.target), READ))
        parts.append(Part(f"{puzzle.solution}\n\n", WRITE))
    return parts


def judge_document(draw: random.Random) -> Document:
    """Numbers on the way to a target, and whether they can reach it."""
    parts: Document = [Part(f"{VALUE_HEADER}\n\n", READ)]
    for _ in range(draw.randint(1, 20)):
        numbers, target, verdict = puzzles.state(draw)
        parts.append(Part(value_head(numbers, target), READ))
        parts.append(Part(f" {verdict}\n\n", JUDGE))
    return parts


def needle_document(draw: random.Random, characters: int, facts: int) -> Document:
    """A text of at most so many characters with at most so many facts, and questions about it."""
    hidden = needles.document(draw, characters, facts)
    parts: Document = [Part(f"Start of document:\n{hidden.text}\nEnd of document\n\n", READ)]
    # The same one may be asked again: else the last answers follow from those before.
    for fact in draw.choices(hidden.facts, k=draw.randint(1, 40)):
        before, stated, after = fact.answer.partition(fact.fact)
        parts.append(Part(f"Question: {fact.question}\nAnswer:", READ))
        parts += [Part(before, WRITE), Part(stated, FACT)]
        parts.append(Part(f"{after}\n\n", WRITE))
    return parts


def few_needles(draw: random.Random) -> Document:
    """One to eight facts with little between."""
    return needle_document(draw, draw.choice((0, 0, 400, 1_000)), draw.randint(2, 8))


def short_needles(draw: random.Random) -> Document:
    """Facts in up to a thousand tokens."""
    size = draw.randint(400, 4_000)
    return needle_document(draw, size, draw.randint(1, size // 80))


def long_needles(draw: random.Random) -> Document:
    """Facts in up to four thousand tokens."""
    size = draw.randint(2_000, 16_000)
    return needle_document(draw, size, draw.choice((1, 2, draw.randint(1, 10), size // 130)))


Maker = Callable[[random.Random], Document]

Mixture = tuple[tuple[Maker, float], ...]

# Shares of the documents in rows of each kind.
LOOKUP: Final[Mixture] = ((few_needles, 1.0),)
SHORT: Final[Mixture] = (
    (word_document, 0.32),
    (program_document, 0.27),
    (solve_document, 0.12),
    (judge_document, 0.14),
    (few_needles, 0.05),
    (short_needles, 0.10),
)
LONG: Final[Mixture] = ((long_needles, 1.0),)


def draw_document(draw: random.Random, mixture: Mixture) -> Document:
    """Draw a document of a mixture."""
    (maker,) = draw.choices([maker for maker, _ in mixture], [share for _, share in mixture])
    return maker(draw)
