"""Reading the letter of a choice out of model text; total, and linear in the text."""

import re
from functools import cache
from typing import Final

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@cache
def _patterns(num: int) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return where one of the first `num` letters is stated, leads, or stands alone."""
    letter = f"([A-{LETTERS[num - 1]}])"
    # "The answer is B", "Answer: (B)", "the correct answer would be **B**".
    stated = re.compile(
        r"\banswer(?:\s++(?:is|would\s++be|must\s++be))?+\s*+:?+\s*+"
        r"(?:(?:option|choice)\s++)?+[(\[{\"'`*$]*+" + letter + r"(?![A-Za-z0-9_])",
        re.ASCII | re.IGNORECASE,
    )
    # "B", "(B)", "**B.** Paris", "B: Paris", "option B".
    leading = re.compile(
        r"\s*+(?:(?:[Oo]ption|[Cc]hoice)\s++)?+[(\[{\"'`*$]*+" + letter
        + r"(?=[)\]}.,:;\"'`*$\n]|\s*\Z)",
        re.ASCII,
    )  # fmt: skip
    # A letter on its own. An "A" or "I" before a word in lower case is that word.
    alone = re.compile(
        r"(?<![A-Za-z0-9_'-])(?![AI][ \t]++[a-z])" + letter + r"(?![A-Za-z0-9_'-])", re.ASCII
    )
    return stated, leading, alone


def first_capital(text: str) -> str | None:
    """Return the first upper-case letter of a text; of "The answer is B" that is T.

    RelayAttention's script reads answers so.
    """
    return next((character for character in text if character.isupper()), None)


def letter_answer(text: str, num: int = 4) -> str | None:
    """Return which of the first `num` letters a text settles on.

    That is the letter after the last "answer is" or "answer:"; else the letter that the text begins
    with; else the letter that stands alone in the text, if there is only one.
    """
    stated_in, leads, stands = _patterns(num)
    stated = [match[1] for match in stated_in.finditer(text) if match[1].isupper()]
    if stated:
        return stated[-1]
    leading = leads.match(text)
    if leading:
        return leading[1]
    alone = {match[1] for match in stands.finditer(text)}
    return alone.pop() if len(alone) == 1 else None
