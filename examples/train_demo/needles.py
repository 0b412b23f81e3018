"""Facts hidden in filler: dogs and their colours, and what is best to do in a town.

The filler is the one that comes with treegen, but for its beginning, which the tasks take.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from treegen.tasks.needle.text import COLOURS, NAMES, SECOND_NAMES, filler

# Characters of the filler that are kept for evaluation.
KEPT: Final = 40_000

_TOWNS: Final = tuple(
    f"{first} {second}"
    for first in ("San", "Port", "New", "Fort", "Lake", "Mount", "Saint", "Glen")
    for second in (
        "Alba",
        "Bruno",
        "Carmel",
        "Dorado",
        "Elmo",
        "Felice",
        "Gerard",
        "Hollow",
        "Isidro",
        "Jordan",
        "Kendal",
        "Lorenzo",
        "Marino",
        "Nicola",
        "Orleans",
        "Pedro",
        "Francisco",
        "Diego",
    )
)
_DOINGS: Final = tuple(
    f"{verb} {what}"
    for verb, many in (
        ("eat", ("a sandwich", "an ice cream", "fried fish", "a bowl of noodles", "warm bread")),
        ("sit in", ("Dolores Park", "the old garden", "Cooper Square", "a quiet cafe")),
        ("ride", ("the cable car", "a bicycle", "the slow train", "a grey horse")),
        ("visit", ("the museum of maps", "Palmer Market", "the lighthouse", "the glass house")),
        ("watch", ("the seals", "the sunset", "the boats", "an open-air play")),
        ("walk along", ("the pier", "Baker Beach", "the city wall", "the canal")),
    )
    for what in many
)
_WHEN: Final = (
    "on a sunny day",
    "in the evening",
    "on a Sunday",
    "after the rain",
    "before noon",
    "in the spring",
    "with a friend",
    "at low tide",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to hide, what is asked about it, the reply, and what in it has to be found."""

    sentence: str
    question: str
    answer: str
    fact: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the facts in it in their order."""

    text: str
    facts: tuple[Fact, ...]


@cache
def _sentences() -> tuple[str, ...]:
    return tuple(re.findall(r"[^.]+\.", filler()[KEPT:])[1:-1])


def dogs(draw: random.Random, num: int) -> list[Fact]:
    """Return so many dogs with different names."""
    names = draw.sample(NAMES, min(num, len(NAMES)))
    if draw.random() < 0.1:
        names = [f"{name} {draw.choice(SECOND_NAMES)}" for name in names]
    facts = []
    for name in names:
        colour = draw.choice(COLOURS)
        facts.append(
            Fact(
                f"The dog named {name} has fur that is {colour}.",
                f"What color is the fur of the dog named {name}?",
                f" ###{colour.title()}###",
                colour.title(),
            )
        )
    return facts


def towns(draw: random.Random, num: int) -> list[Fact]:
    """Return so many towns and what is best to do there."""
    facts = []
    for town in draw.sample(_TOWNS, min(num, 12)):
        doing = " and ".join(draw.sample(_DOINGS, draw.randint(1, 2)))
        if draw.random() < 0.7:
            doing += f" {draw.choice(_WHEN)}"
        facts.append(
            Fact(
                f"The best thing to do in {town} is {doing}.",
                f"What is the best thing to do in {town}?",
                f" {doing}.",
                f" {doing}",
            )
        )
    return facts


def document(draw: random.Random, characters: int, num: int) -> Document:
    """Draw a text of about so many characters with `num` facts."""
    kind: Callable[[random.Random, int], list[Fact]] = dogs if draw.random() < 0.9 else towns
    facts = kind(draw, num)
    chosen = _run(draw, characters - sum(len(fact.sentence) for fact in facts))
    parts: list[str] = []
    position = 0
    for stop, fact in zip(_draw_positions(draw, len(facts), len(chosen)), facts, strict=True):
        parts += chosen[position:stop]
        parts.append(fact.sentence)
        position = stop
    parts += chosen[position:]
    return Document(" ".join(parts), tuple(facts))


def _run(draw: random.Random, characters: int) -> Sequence[str]:
    """Return sentences in a row from anywhere in the filler."""
    sentences = _sentences()
    start = draw.randrange(len(sentences))
    chosen: list[str] = []
    size = 0
    while size < characters:
        sentence = sentences[(start + len(chosen)) % len(sentences)].strip()
        chosen.append(sentence)
        size += len(sentence) + 1
    return chosen


def _draw_positions(draw: random.Random, num: int, size: int) -> list[int]:
    """Return before which sentence each fact goes: anywhere, or at even distances."""
    if draw.random() < 0.5:
        return sorted(draw.randint(0, size) for _ in range(num))
    return [round(index / max(1, num - 1) * size) for index in range(num)]
