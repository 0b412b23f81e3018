"""Checks of natural language: which language a text is in, its sentences and its words.

Languages are detected by the package langdetect, which the published code uses. langdetect draws at
random. Here it uses a fixed seed, so that a score is always the same.

The published code splits sentences with nltk's Punkt, and words with nltk's tokenizer, which splits
sentences first. Punkt needs data that nltk downloads: `python -m nltk.downloader punkt_tab`.
Without it, `sentences=rule` uses treegen's own rule: a sentence ends at ., ! or ? before white
space or the end, and a word is a run of letters, digits, apostrophes and hyphens. Its scores are
not the published ones.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from treegen.tasks.ifeval.checks import Check, number, relation, text

# langdetect reads 10,000 characters, after it has removed addresses.
_READ: Final = 100_000


def is_langdetect_installed() -> bool:
    """Return whether the package that detects languages is installed."""
    return find_spec("langdetect") is not None


def language_of(answer: str) -> str | None:
    """Return the code of a text's language, such as "en"; None if it has no usable letters."""
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(answer[:_READ])
    try:
        language: str = detector.detect()
    except LangDetectException:
        return None
    return language


def response_language(arguments: Mapping[str, Any]) -> Check:
    """Require a language. A text without letters passes, as published."""
    wanted = text(arguments, "language")
    return lambda answer: language_of(answer) in (wanted, None)


def english_capital(arguments: Mapping[str, Any]) -> Check:
    """Require English in capital letters only."""
    return lambda answer: answer.isupper() and language_of(answer) in ("en", None)


def english_lowercase(arguments: Mapping[str, Any]) -> Check:
    """Require English in lower case only."""
    return lambda answer: answer.islower() and language_of(answer) in ("en", None)


@cache
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


PUNKT: Final = "punkt"
RULE: Final = "rule"
NEEDED: Final = "python -m nltk.downloader punkt_tab"

_END: Final = re.compile(r"[.!?][\"')\]]*+(?=\s|\Z)")
_WORD: Final = re.compile(r"\w[\w'-]*+")


def missing_for_punkt() -> str | None:
    """Return the command that installs what Punkt needs; None if nothing is missing."""
    if find_spec("nltk") is None:
        return f"pip install nltk, and {NEEDED}"
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english")
    except LookupError:
        return NEEDED
    return None


def number_sentences(arguments: Mapping[str, Any], way: str) -> Check:
    """Require a number of sentences.

    Args:
        arguments: Arguments of the instruction.
        way: How sentences are split, PUNKT or RULE.
    """
    holds = relation(arguments, "relation", number(arguments, "num_sentences"))
    count = _count_by_rule if way == RULE else _count_by_punkt
    return lambda answer: holds(count(answer))


def capital_word_frequency(arguments: Mapping[str, Any], way: str) -> Check:
    """Require a number of words in capital letters only.

    Args:
        arguments: Arguments of the instruction.
        way: How words are split, PUNKT or RULE.
    """
    holds = relation(arguments, "capital_relation", number(arguments, "capital_frequency"))
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
