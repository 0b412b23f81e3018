"""Checks of words, letters, lengths and case, in time linear in the text.

Patterns in the data may take longer; their checks fail after a time limit.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from treegen.common.bounded.patterns import CountedPattern
from treegen.tasks.ifeval.arguments import Check, number, relation, text, texts

_WORD: Final = re.compile(r"\w+")
_DIVIDER: Final = re.compile(r"\s?\*\*\*\s?")
_AFTER_WORD: Final = re.compile("[.,?!'\"]")


def existence(given: Mapping[str, Any]) -> Check:
    """Require every keyword, ignoring case; keywords are patterns, as published."""
    wanted = [CountedPattern(word, ignore_case=True) for word in texts(given, "keywords")]
    return lambda answer: all(each.count(answer) for each in wanted)


def frequency(given: Mapping[str, Any]) -> Check:
    """Require a number of occurrences of a keyword."""
    word = CountedPattern(text(given, "keyword").strip(), ignore_case=True)
    holds = relation(given, "relation", number(given, "frequency"))

    def check(answer: str) -> bool:
        count = word.count(answer)
        return count is not None and holds(count)

    return check


def forbidden_words(given: Mapping[str, Any]) -> Check:
    """Require that no keyword occurs as a separate word."""
    words = [
        CountedPattern(word, r"\b{}\b", ignore_case=True)
        for word in texts(given, "forbidden_words")
    ]
    return lambda answer: all(each.count(answer) == 0 for each in words)


def letter_frequency(given: Mapping[str, Any]) -> Check:
    """Require a number of occurrences of a letter, ignoring case.

    If the argument is not a letter of the alphabet, the published code draws a letter at random.
    """
    letter = text(given, "letter").strip().lower()
    if len(letter) != 1:
        raise ValueError("letter must be one letter")
    holds = relation(given, "let_relation", number(given, "let_frequency"))
    return lambda answer: holds(answer.lower().count(letter))


def number_words(given: Mapping[str, Any]) -> Check:
    """Require a number of words, which are runs of letters, digits and underscores."""
    holds = relation(given, "relation", number(given, "num_words"))
    return lambda answer: holds(sum(1 for _ in _WORD.finditer(answer)))


def number_paragraphs(given: Mapping[str, Any]) -> Check:
    """Require an exact number of paragraphs with *** between them; only the ends may be empty."""
    wanted = number(given, "num_paragraphs")

    def check(answer: str) -> bool:
        parts = _DIVIDER.split(answer)
        filled = [bool(part.strip()) for part in parts]
        return all(filled[1:-1]) and sum(filled) == wanted

    return check


def nth_paragraph_first_word(given: Mapping[str, Any]) -> Check:
    """Require a number of paragraphs between blank lines, one of which begins with a word."""
    wanted, place = number(given, "num_paragraphs"), number(given, "nth_paragraph")
    word = text(given, "first_word").lower()

    def check(answer: str) -> bool:
        parts = answer.split("\n\n")
        filled = sum(bool(part.strip()) for part in parts)
        # The place counts blank paragraphs, the number does not, as published.
        if not 0 < place <= filled or not parts[place - 1].strip():
            return False
        first = parts[place - 1].split(None, 1)[0].lstrip("'").lstrip('"')
        first = _AFTER_WORD.split(first, maxsplit=1)[0]
        return filled == wanted and "".join(letter.lower() for letter in first) == word

    return check


def no_comma(given: Mapping[str, Any]) -> Check:
    """Require that there is no comma."""
    return lambda answer: "," not in answer
