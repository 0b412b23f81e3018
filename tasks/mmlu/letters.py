"""Reading the letter of a choice out of model text; total, and linear in the text."""

import re
from typing import Final

# "The answer is B", "Answer: (B)", "the correct answer would be **B**".
_STATED: Final = re.compile(
    r"\banswer(?:\s++(?:is|would\s++be|must\s++be))?+\s*+:?+\s*+"
    r"(?:(?:option|choice)\s++)?+[(\[{\"'`*$]*+([A-D])(?![A-Za-z0-9_])",
    re.ASCII | re.IGNORECASE,
)
# "B", "(B)", "**B.** Paris", "B: Paris", "option B".
_LEADING: Final = re.compile(
    r"\s*+(?:(?:[Oo]ption|[Cc]hoice)\s++)?+[(\[{\"'`*$]*+([A-D])(?=[)\]}.,:;\"'`*$\n]|\s*\Z)",
    re.ASCII,
)
# A letter on its own. An "A" before a word in lower case is the article.
_ALONE: Final = re.compile(
    r"(?<![A-Za-z0-9_'-])(?!A[ \t]++[a-z])([A-D])(?![A-Za-z0-9_'-])", re.ASCII
)


def first_capital(text: str) -> str | None:
    """Return the first upper-case letter of a text; of "The answer is B" that is T.

    RelayAttention's script reads answers so.
    """
    return next((character for character in text if character.isupper()), None)


def letter_answer(text: str) -> str | None:
    """Return the choice A to D that a text settles on.

    That is the letter after the last "answer is" or "answer:"; else the letter that the text begins
    with; else the letter that stands alone in the text, if there is only one.
    """
    stated = [match[1] for match in _STATED.finditer(text) if match[1].isupper()]
    if stated:
        return stated[-1]
    leading = _LEADING.match(text)
    if leading:
        return leading[1]
    alone = {match[1] for match in _ALONE.finditer(text)}
    return alone.pop() if len(alone) == 1 else None
