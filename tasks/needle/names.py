"""Words of needles: colours of fur, and names of dogs. No name is a prefix of another."""

import random
from typing import Final

from treegen.errors import InputError
from treegen.tasks.common.sources import bundled_rows

COLOURS: Final = ("white", "black", "brown", "red", "golden", "silver", "cream", "blue")

# The words of each kind: names of dogs, and the parts of RULER's keys.
WORDS: Final = {
    row["kind"]: tuple(row["words"].split()) for _, row in bundled_rows("needle_words.jsonl")
}
NAMES: Final = WORDS["dogs"]
SECOND_NAMES: Final = WORDS["second_names"]


def draw_names(draw: random.Random, num: int) -> list[str]:
    """Return `num` different names in random order, none of which is a prefix of another.

    If there are enough single names, these are used. Otherwise every dog has two names, and the
    first names are spread as evenly as possible.

    Raises:
        InputError: There are too few names.
    """
    if num <= len(NAMES):
        return draw.sample(NAMES, num)
    most = len(NAMES) * len(SECOND_NAMES)
    if num > most:
        raise InputError(
            f"there are names for {most:,} dogs at most, but {num:,} are needed; ask for fewer"
        )
    rounds = -(-num // len(NAMES))
    seconds = {first: draw.sample(SECOND_NAMES, rounds) for first in NAMES}
    names: list[str] = []
    for turn in range(rounds):
        wanted = min(len(NAMES), num - len(names))
        names += [f"{first} {seconds[first][turn]}" for first in draw.sample(NAMES, wanted)]
    draw.shuffle(names)
    return names


def draw_colours(draw: random.Random, num: int) -> list[str]:
    """Return `num` colours in random order. Their counts differ by at most one."""
    order = draw.sample(COLOURS, len(COLOURS))
    colours = [order[index % len(order)] for index in range(num)]
    draw.shuffle(colours)
    return colours
