"""Reads the choice in a text by the published rules of MMMU and MMMU-Pro.

They are those of parse_multi_choice_response in mmmu/utils/eval_utils.py and in
mmmu-pro/evaluate.py of https://github.com/MMMU-Benchmark/MMMU.
"""

import hashlib
from collections.abc import Callable, Sequence
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
        if found := _last(text, [(letter, form(letter)) for letter in LETTERS[: len(options)]]):
            return found
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
    if announced and len(found := [letter for letter in letters if letter in after]) == 1:
        return found[0]
    text = _bare(text)
    if found_last := _last(text, [(letter, _in_brackets(letter)) for letter in letters]):
        return found_last
    for end in (" ", "."):
        if found := [letter for letter in letters if f"{letter}{end}" in text]:
            return max(found, key=lambda letter: text.rfind(_alone(letter)))
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


_Form = Callable[[str], str]


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
