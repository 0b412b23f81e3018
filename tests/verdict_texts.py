"""Texts such as judges write, made by a seed, for comparisons of readers."""

import random

PIECES = (
    "A",
    "B",
    "C",
    "CORRECT",
    "INCORRECT",
    "NOT_ATTEMPTED",
    "a",
    "b",
    "Because ",
    "grade: ",
    "\n",
    " ",
    "[[A]]",
    "[[B]]",
    "[[C]]",
    "[A]",
    "[[7]]",
    "[[10]]",
    "[[3.5]]",
    "[[8.]]",
    "[6]",
    "[4.5]",
    "[[x]]",
    "Rating: ",
    "the answer is right",
    "10",
    "[[",
    "]]",
    "verdict ",
    "D",
    "",
    "tie",
)


def texts(num: int, seed: int) -> list[str]:
    """Made-up texts; a third of them is one piece."""
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.choice([1, 3, 6]))) for _ in range(num)]
