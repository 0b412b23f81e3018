"""One problem of RULER's needle tests: its keys, values and needles, and the prompt around them."""

import random
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from treegen.errors import InputError
from treegen.tasks.needle.text import WORDS, Document, Haystack, insert, join_pieces

ADJECTIVES: Final = WORDS["adjectives"]
NOUNS: Final = WORDS["nouns"]

Values = Literal["numbers", "uuids"]

_NEEDLE: Final = "One of the special magic {kind} for {key} is: {value}."
_NOISE: Final = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_MANY: Final = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_MANY_REPLY: Final = " The special magic {kind} for {query} mentioned in the provided text are"
# Templates for a single requested value.
_ONE: Final = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_ONE_REPLY: Final = " The special magic {kind} for {query} mentioned in the provided text is"

# Needles are at some of 40 depths, the first at the start and the last at the end.
_NUM_DEPTHS: Final = 40

_FOUND: Final[Mapping[Values, re.Pattern[str]]] = {
    "numbers": re.compile(r"(?<![0-9])[0-9]{7}(?![0-9])"),
    "uuids": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the tests: the kind of text, the number of needles, and how many are requested."""

    name: str
    """The end of the task's name."""
    haystack: Literal["essay", "noise", "needles"] = "essay"
    """The kind of text."""
    keys: Literal["words", "uuids"] = "words"
    """The kind of the keys."""
    values: Values = "numbers"
    """The kind of the values."""
    num_keys: int = 1
    """Number of keys; each has a needle for each of its values."""
    num_values: int = 1
    """Values per key."""
    num_queries: int = 1
    """Number of requested keys."""


def find_values(text: str, values: Values) -> list[str]:
    """Return every different value in a text, in ascending order."""
    return sorted(set(_FOUND[values].findall(text.casefold())))


class RulerItem:
    """One problem, whose filler can still have any size.

    Attributes:
        values: The requested values.
        reply: The beginning of the answer.
    """

    def __init__(self, variant: Variant, haystack: Haystack, seed: str) -> None:
        self._variant = variant
        self._haystack = haystack
        self._seed = seed
        draw = random.Random(seed)
        keys = _keys(draw, variant)
        self._own_keys = [next(keys) for _ in range(variant.num_keys)]
        num_needles = variant.num_keys * variant.num_values
        values = iter(_draw_values(draw, variant.values, num_needles))
        needles: list[tuple[str, str]] = [
            (key, next(values)) for key in self._own_keys for _ in range(variant.num_values)
        ]
        queries = draw.sample(self._own_keys, variant.num_queries)
        self.values = [value for wanted in queries for key, value in needles if key == wanted]
        draw.shuffle(needles)
        self._needles = [self._say(key, value) for key, value in needles]
        places = sorted(draw.sample(range(_NUM_DEPTHS), len(needles)))
        self._depths = [place / (_NUM_DEPTHS - 1) for place in places]
        *first, last = queries
        self._query = f"{', '.join(first)}, and {last}" if first else last
        self.reply = self._fill(_ONE_REPLY if self._is_one else _MANY_REPLY)

    def question(self, size: int) -> str:
        """Return the prompt up to where the answer begins, with `size` characters of filler."""
        context = self._document(size).text
        return self._fill(_ONE if self._is_one else _MANY, context)

    def prompt(self, size: int) -> str:
        """Return the whole prompt."""
        return self.question(size) + self.reply

    def depth(self, size: int) -> float | None:
        """Return the depth of the needle, from 0 to 1; None if there are several."""
        return self._document(size).depth(0) if len(self._needles) == 1 else None

    @property
    def _is_one(self) -> bool:
        return len(self.values) == 1

    def _say(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self._variant.values, key=key, value=value)

    def _fill(self, template: str, context: str = "") -> str:
        kind = self._variant.values.removesuffix("s") if self._is_one else self._variant.values
        return template.format(kind=kind, query=self._query, context=context)

    def _document(self, size: int) -> Document:
        needles = list(zip(self._depths, self._needles, strict=True))
        if self._variant.haystack == "essay":
            return insert(self._haystack.take(size), needles)
        if self._variant.haystack == "noise":
            lines = [_NOISE] * (size // (len(_NOISE) + 1))
        else:
            lines = self._distractors(size)
        return _insert_lines(lines, needles)

    def _distractors(self, size: int) -> list[str]:
        """Return needles that are not requested. A larger size only adds needles."""
        draw = random.Random(f"{self._seed} distractors")
        keys = _keys(draw, self._variant)
        lines: list[str] = []
        while True:
            key = next(keys)
            (value,) = _draw_values(draw, self._variant.values, 1)
            if key in self._own_keys or value in self.values:
                continue
            line = self._say(key, value)
            size -= len(line) + 1
            if size < 0:
                return lines
            lines.append(line)


def _insert_lines(lines: list[str], needles: list[tuple[float, str]]) -> Document:
    pieces: list[tuple[str, bool]] = []
    done = 0
    for depth, needle in needles:
        upto = round(depth * len(lines))
        pieces += [*((line, False) for line in lines[done:upto]), (needle, True)]
        done = upto
    return join_pieces([*pieces, *((line, False) for line in lines[done:])], "\n")


@lru_cache(maxsize=1)
def _word_keys() -> tuple[str, ...]:
    return tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)


def _keys(draw: random.Random, variant: Variant) -> Iterator[str]:
    """Yield different keys.

    Raises:
        InputError: All keys that the words can make are used up.
    """
    if variant.keys == "uuids":
        while True:
            yield _uuid(draw)
    words = _word_keys()
    used: set[str] = set()
    while len(used) < len(words):
        key = draw.choice(words)
        if key not in used:
            used.add(key)
            yield key
    raise InputError(f"a text of needles has at most {len(words):,} keys; ask for a shorter one")


def _draw_values(draw: random.Random, values: Values, num: int) -> list[str]:
    if values == "uuids":
        return [_uuid(draw) for _ in range(num)]
    return [str(number) for number in draw.sample(range(10**6, 10**7), num)]


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
