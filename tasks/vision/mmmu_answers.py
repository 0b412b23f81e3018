"""Reads choices and scores free answers of MMMU and MMMU-Pro by their published rules.

Choices are read as by parse_multi_choice_response in mmmu/utils/eval_utils.py and in
mmmu-pro/evaluate.py of https://github.com/MMMU-Benchmark/MMMU, free answers as by
parse_open_response and eval_open in mmmu/utils/eval_utils.py: a text has many readings, and one
right reading is enough.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STRIPPED: Final = ",.!?;:'"
_LONG: Final = 5  # a text with more words may quote the text of a choice


def mmmu_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that MMMU's parser reads; None where the parser would guess.

    It is the first of these: the last "(B)", the last "B" between spaces, the choice quoted last.
    """
    text = _bare(text)
    for form in (_in_brackets, _alone):
        forms = [(letter, form(letter)) for letter in LETTERS[: len(options)]]
        if last := _last(text, forms):
            return last
    return _find_quoted_option(text, options)


def mmmu_pro_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that MMMU-Pro's parser reads; None where the parser would guess.

    If exactly one letter occurs after the last "Answer:", it is the answer. Otherwise the rules are
    those of `mmmu_letter`, but a letter also counts before a space or a full stop, as the "A" of
    "FDA approved". If there are several, the last one between spaces is read; without one between
    spaces, the first in the alphabet.
    """
    letters = LETTERS[: len(options)]
    _, announced, after = text.rpartition("Answer:")
    if announced and len(named := [letter for letter in letters if letter in after]) == 1:
        return named[0]
    text = _bare(text)
    if last := _last(text, [(letter, _in_brackets(letter)) for letter in letters]):
        return last
    for end in (" ", "."):
        if named := [letter for letter in letters if f"{letter}{end}" in text]:
            return max(named, key=lambda letter: text.rfind(_alone(letter)))
    return _find_quoted_option(text, options)


def guess(problem_id: str, text: str, num: int) -> str:
    """Return one of `num` letters, drawn by a hash, for a text without a readable choice.

    The published parsers also draw it, in an order of calls that is not documented.

    Args:
        problem_id: Id of the problem.
        text: Text of the sample.
        num: Number of choices.
    """
    digest = hashlib.sha256(f"{problem_id}\n{text}".encode("utf-8", "surrogatepass")).digest()
    return LETTERS[int.from_bytes(digest[:8], "big") % num]


def _in_brackets(letter: str) -> str:
    return f"({letter})"


def _alone(letter: str) -> str:
    return f" {letter} "


def _bare(text: str) -> str:
    """Return a text without the marks around it, between two spaces."""
    for mark in _STRIPPED:  # strip one mark at a time, as published, so an inner mark may stay
        text = text.strip(mark)
    return f" {text} "


def _find_quoted_option(text: str, options: Sequence[str]) -> str | None:
    if len(text.split()) <= _LONG:
        return None
    return _last(text.lower(), list(zip(LETTERS, (option.lower() for option in options))))  # noqa: B905


def _last(text: str, forms: Sequence[tuple[str, str]]) -> str | None:
    """Return the letter whose form begins last in a text; the first of equal ones."""
    places = {letter: text.rfind(form) for letter, form in forms}
    best = max(places, key=lambda letter: places[letter], default=None)
    return None if best is None or places[best] < 0 else best


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
    """The possible answers in a text."""

    readings: frozenset[Reading]
    """Its readings; numbers are rounded to two places."""
    shown: str
    """The reading used for votes: the last number, otherwise the last words."""

    def has(self, answers: Iterable[str]) -> bool:
        """Return whether a reading is one of the right answers, or contains one of them."""
        right = [reading for answer in answers for reading in _normal(answer)]
        words = [reading for reading in right if isinstance(reading, str)]
        return any(
            any(word in reading for word in words) if isinstance(reading, str) else reading in right
            for reading in self.readings
        )


def readings(text: str) -> ParsedAnswers:
    """Return the possible answers in a text."""
    stated = _find_stated(text)
    numbers = [number for part in stated for number in _numbers(part)]
    all_readings = frozenset(reading for part in (*stated, *numbers) for reading in _normal(part))
    last = _WHOLE.findall(stated[-1])
    # Adding 0 turns -0 into 0.
    shown = f"{float(_normal(last[-1])[0]) + 0:.12g}" if last else " ".join(stated[-1].split())
    return ParsedAnswers(all_readings, shown)


def _find_stated(text: str) -> list[str]:
    """Return the ends of lines that announce an answer; the whole text if none does."""
    text = text.strip().strip(".").lower()
    stated = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        shortest = ""
        for word in (*_ANNOUNCING, *(("=",) if number == len(lines) else ())):
            if word in line:
                end = line.rpartition(word)[2].strip()
                if not shortest or len(end) < len(shortest):
                    shortest = end
        if shortest and shortest not in _TRIVIAL:
            stated.append(shortest)
    return stated or [text]


def _numbers(text: str) -> Sequence[str]:
    return [number for kind in (_GROUPED, _POWERS, _PLAIN) for number in kind.findall(text)]


def _normal(text: str) -> list[Reading]:
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        # A single letter must be a word of its own.
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
