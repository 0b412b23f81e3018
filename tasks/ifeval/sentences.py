"""Checks that need sentences: their number, and words in capital letters.

The published code splits sentences with nltk's Punkt, and words with nltk's tokenizer, which splits
sentences first. Punkt needs data that nltk downloads: `python -m nltk.downloader punkt_tab`.

Without it, `sentences=rule` uses treegen's own rule: a sentence ends at ., ! or ? before white
space or the end, and a word is a run of letters, digits, apostrophes and hyphens. Its scores are
not the published ones.
"""

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

from treegen.tasks.ifeval.checks import Check, number, relation

PUNKT: Final = "punkt"
RULE: Final = "rule"
NEEDED: Final = "python -m nltk.downloader punkt_tab"

_END: Final = re.compile(r"[.!?][\"')\]]*+(?=\s|\Z)")
_WORD: Final = re.compile(r"\w[\w'-]*+")


def missing() -> str | None:
    """Return the command that installs what Punkt needs; None if nothing is missing."""
    if find_spec("nltk") is None:
        return f"pip install nltk, and {NEEDED}"
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english")
    except LookupError:
        return NEEDED
    return None


def number_sentences(given: Mapping[str, Any], way: str) -> Check:
    """Require a number of sentences.

    Args:
        given: Arguments of the instruction.
        way: How sentences are split, PUNKT or RULE.
    """
    holds = relation(given, "relation", number(given, "num_sentences"))
    count = _count_by_rule if way == RULE else _count_by_punkt
    return lambda answer: holds(count(answer))


def capital_word_frequency(given: Mapping[str, Any], way: str) -> Check:
    """Require a number of words in capital letters only.

    Args:
        given: Arguments of the instruction.
        way: How words are split, PUNKT or RULE.
    """
    holds = relation(given, "capital_relation", number(given, "capital_frequency"))
    words: Callable[[str], list[str]] = _WORD.findall if way == RULE else _words_by_punkt
    return lambda answer: holds(sum(word.isupper() for word in words(answer)))


def _count_by_rule(answer: str) -> int:
    ends = [match.end() for match in _END.finditer(answer)]
    rest = answer[ends[-1] :] if ends else answer
    return len(ends) + bool(rest.strip())


def _count_by_punkt(answer: str) -> int:
    from nltk.tokenize import sent_tokenize

    return len(sent_tokenize(answer))


def _words_by_punkt(answer: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    words: list[str] = word_tokenize(answer)
    return words
