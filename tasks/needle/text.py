"""Haystacks: sources of filler text, and how sentences are hidden in it."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from treegen.errors import DataError
from treegen.tasks.common.files import read_text
from treegen.tasks.needle.filler import filler

# The end of a sentence, with closing quotes and brackets. A full stop after a short capitalised
# word does not end a sentence, because it is more likely Mr. or St. or an initial.
_END: Final = re.compile(
    r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z]{2})"
    r"[.!?]+[\"'\u2019\u201d)\]]*(?= |$)|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*"
)
_LONGEST_WORD: Final = 200
_CLOSERS: Final = "\"'\u2019\u201d)]\u300d\u300f"
_STOPS: Final = (".", "!", "?", "\u3002", "\uff01", "\uff1f")


@dataclass(frozen=True, slots=True)
class Haystack:
    """Filler text in one line."""

    text: str
    source: str
    """Its name."""

    def take(self, size: int) -> str:
        """Return at most `size` characters from the start.

        The text has whole words and ends like a sentence. A text that is too short is repeated.
        """
        if size < 2:
            return ""
        repeats = -(-size // (len(self.text) + 1))
        whole = self.text if repeats == 1 else " ".join([self.text] * repeats)
        if len(whole) <= size and _is_ended(whole):
            return whole
        part = whole[: size - 1]
        if len(whole) > size - 1 and whole[size - 1] != " " and " " in part:
            part = part[: part.rindex(" ")]
        part = part.rstrip(" ,;:-")
        return part if not part or _is_ended(part) else f"{part}."

    def describe(self, size: int) -> str:
        """Return the source and how much of it `size` characters are."""
        if size <= len(self.text):
            return f"{size:,} characters of {self.source}"
        return f"{self.source}, repeated {size / len(self.text):.1f} times"


@dataclass(frozen=True, slots=True)
class Document:
    """Filler with needles in it."""

    text: str
    starts: tuple[int, ...]
    """Index of the first character of each needle."""

    def depth(self, index: int) -> float:
        """Return the depth at which a needle begins, from 0 to 1."""
        return self.starts[index] / len(self.text)


def load_haystack(data: str | None) -> Haystack:
    """Read a text file, or all *.txt files of a directory in the order of their names.

    Any run of spaces and line ends becomes one space.

    Args:
        data: The path; None for the bundled text.

    Raises:
        DataError: There is no text, or it cannot be read.
    """
    if data is None:
        return Haystack(filler(), "bundled filler")
    path = Path(data)
    paths = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not paths:
        raise DataError(f"{path} has no *.txt files; give a text, or a folder of *.txt")
    text = " ".join(" ".join(map(read_text, paths)).split())
    if not text:
        raise DataError(f"{path} is empty; give a text for the needles to lie in")
    return Haystack(text, str(path))


def check_absent(haystack: Haystack, phrase: str) -> None:
    """Raise DataError if the filler already contains the phrase of a needle."""
    if phrase.casefold() in haystack.text.casefold():
        raise DataError(
            f"{haystack.source} already contains {phrase!r}; take another text as haystack"
        )


def insert(text: str, needles: Sequence[tuple[float, str]], *, reach: int = 500) -> Document:
    """Return the text with needles inserted.

    Each needle is put behind the last sentence that ends before its depth, or behind the last word
    if that sentence is more than `reach` characters away.

    Args:
        text: The filler.
        needles: (depth, sentence) of each needle; depths are from 0 to 1 and must not descend.
        reach: Maximum distance in characters to the end of a sentence.
    """
    ends = _ends(text)
    cuts = [0, *(_cut(text, ends, round(depth * len(text)), reach) for depth, _ in needles)]
    pieces: list[tuple[str, bool]] = []
    for (previous, cut), (_, needle) in zip(pairwise(cuts), needles, strict=True):
        pieces += [(text[previous:cut].strip(" "), False), (needle, True)]
    pieces.append((text[cuts[-1] :].strip(" "), False))
    return join_pieces(pieces, " ")


def join_pieces(pieces: Iterable[tuple[str, bool]], gap: str) -> Document:
    """Return the document of (text, whether it is a needle), without the texts that are empty."""
    parts: list[str] = []
    starts: list[int] = []
    position = 0
    for text, is_needle in pieces:
        if is_needle:
            starts.append(position)
        if text:
            parts.append(text)
            position += len(text) + len(gap)
    return Document(gap.join(parts), tuple(starts))


# The same filler is used repeatedly, with needles in other places.
@lru_cache(maxsize=4)
def _ends(text: str) -> tuple[int, ...]:
    """Return the ends of sentences, and the start and the end of the text."""
    return (*dict.fromkeys([0, *(match.end() for match in _END.finditer(text)), len(text)]),)


def _cut(text: str, ends: Sequence[int], target: int, reach: int) -> int:
    end = ends[bisect_right(ends, target) - 1]
    if target - end <= reach:
        return end
    space = text.rfind(" ", max(end, target - _LONGEST_WORD), target + 1)
    if space >= 0:
        return space
    # Cut scripts without spaces anywhere.
    return target if target - end > _LONGEST_WORD else end


def _is_ended(text: str) -> bool:
    return text.rstrip(_CLOSERS).endswith(_STOPS)
