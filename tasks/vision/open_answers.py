"""Scores free answers of MMMU by its published rules.

They are those of parse_open_response and eval_open in mmmu/utils/eval_utils.py of
https://github.com/MMMU-Benchmark/MMMU: a text has many readings, and one right reading is enough.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

Reading = str | float

_ANNOUNCING: Final = (
    "could be ",
    "so ",
    "is ",
    "thus ",
    "therefore ",
    "final ",
    "answer ",
    "result ",
)
_TRIVIAL: Final = frozenset(":,.!?;'")
# Each match begins at the start of a run of digits; otherwise long runs would take quadratic time.
_GROUPED: Final = re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b")
_POWERS: Final = re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+")
_PLAIN: Final = re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])")
# The three patterns may each match a part of a number. Votes need the whole number: 1,000 is 1000.
_WHOLE: Final = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class ParsedAnswers:
    """The possible answers in a text.

    found: its readings; numbers are rounded to two places.
    shown: the reading used for votes: the last number, otherwise the last words.
    """

    found: frozenset[Reading]
    shown: str

    def has(self, answers: Iterable[str]) -> bool:
        """Return whether a reading is one of the right answers, or contains one of them."""
        right = [each for answer in answers for each in _normal(answer)]
        words = [each for each in right if isinstance(each, str)]
        return any(
            any(word in each for word in words) if isinstance(each, str) else each in right
            for each in self.found
        )


def readings(text: str) -> ParsedAnswers:
    """Return the possible answers in a text."""
    stated = _find_stated(text)
    numbers = [number for part in stated for number in _numbers(part)]
    found = frozenset(each for part in (*stated, *numbers) for each in _normal(part))
    last = _WHOLE.findall(stated[-1])
    # Adding 0 turns -0 into 0.
    shown = f"{float(_normal(last[-1])[0]) + 0:.12g}" if last else " ".join(stated[-1].split())
    return ParsedAnswers(found, shown)


def _find_stated(text: str) -> list[str]:
    """Return the ends of lines that announce an answer; the whole text if none does."""
    text = text.strip().strip(".").lower()
    found = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        shortest = ""
        for word in (*_ANNOUNCING, *(("=",) if number == len(lines) else ())):
            if word in line:
                end = line.rpartition(word)[2].strip()
                if not shortest or len(end) < len(shortest):
                    shortest = end
        if shortest and shortest not in _TRIVIAL:
            found.append(shortest)
    return found or [text]


def _numbers(text: str) -> Sequence[str]:
    return [found for kind in (_GROUPED, _POWERS, _PLAIN) for found in kind.findall(text)]


def _normal(text: str) -> list[Reading]:
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        # A single letter must be a word of its own.
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
