"""Checks of an answer's words, letters, lengths, content and form, in time linear in the text.

The published code uses regular expressions, some of which take quadratic time on long runs of
spaces or brackets. The results are the same. Patterns in the data may take longer; their checks
fail after a time limit.

Languages are detected by the package langdetect, which the published code uses. langdetect draws at
random. Here it uses a fixed seed, so that a score is always the same.

The published code splits sentences with nltk's Punkt, and words with nltk's tokenizer, which splits
sentences first. Punkt needs data that nltk downloads: `python -m nltk.downloader punkt_tab`.
Without it, `sentences=rule` uses treegen's own rule: a sentence ends at ., ! or ? before white
space or the end, and a word is a run of letters, digits, apostrophes and hyphens. Its scores are
not the published ones.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from treegen.common.bounded.patterns import CountedPattern
from treegen.tasks.common.files import text_field

Check = Callable[[str], bool]
"""Returns whether an answer follows an instruction, in time linear in the answer."""

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
    language = text(arguments, "language")
    return lambda answer: language_of(answer) in (language, None)


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
_RULE_WORD: Final = re.compile(r"\w[\w'-]*+")


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
    words: Callable[[str], list[str]] = _RULE_WORD.findall if way == RULE else _words_by_punkt
    return lambda answer: holds(sum(word.isupper() for word in words(answer)))


def _count_by_rule(answer: str) -> int:
    ends = [match.end() for match in _END.finditer(answer)]
    tail = answer[ends[-1] :] if ends else answer
    return len(ends) + bool(tail.strip())


def _count_by_punkt(answer: str) -> int:
    from nltk.tokenize import sent_tokenize

    return len(sent_tokenize(answer))


def _words_by_punkt(answer: str) -> list[str]:
    from nltk.tokenize import word_tokenize

    words: list[str] = word_tokenize(answer)
    return words


def number(arguments: Mapping[str, Any], name: str) -> int:
    """Return an integer from 0; raise ValueError if it is missing or invalid."""
    value = arguments.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a non-negative integer, got {value!r:.40}")
    return value


def text(arguments: Mapping[str, Any], name: str) -> str:
    """Return a text; raise ValueError if it is missing or invalid."""
    return text_field(arguments, name)


def texts(arguments: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of texts; raise ValueError if it is missing or invalid."""
    values = arguments.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} is not a list of texts")
    return [text_field({name: value}, name) for value in values]


def relation(arguments: Mapping[str, Any], name: str, bound: int) -> Callable[[int], bool]:
    """Return the test of a count against a bound.

    Args:
        arguments: Arguments of the instruction.
        name: Name of the argument with the relation: "less than" or "at least".
        bound: The bound.

    Raises:
        ValueError: The relation is unknown.
    """
    word = arguments.get(name)
    if word == "less than":
        return lambda count: count < bound
    if word == "at least":
        return lambda count: count >= bound
    raise ValueError(f"{name} must be 'less than' or 'at least', got {word!r:.40}")


_OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS: Final = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
# A line that begins with a single star, or a dash. The end of the line may follow the star.
_STARS: Final = re.compile(r"^[^\S\n]*+\*[^*].*$", re.MULTILINE)
_DASHES: Final = re.compile(r"^[^\S\n]*+-.*$", re.MULTILINE)
_HIGHLIGHT: Final = re.compile(r"\*[^\n*]*+\*")
_DOUBLE: Final = re.compile(r"\*\*[^\n*]*+\*\*")
_RESPONSES: Final = "******"


def number_placeholders(arguments: Mapping[str, Any]) -> Check:
    """Require at least a number of texts in square brackets, each within a line."""
    num_placeholders = number(arguments, "num_placeholders")
    return lambda answer: sum(map(_brackets, answer.split("\n"))) >= num_placeholders


def _brackets(line: str) -> int:
    count, at = 0, 0
    while (start := line.find("[", at)) >= 0 and (end := line.find("]", start + 1)) >= 0:
        count, at = count + 1, end + 1
    return count


def postscript(arguments: Mapping[str, Any]) -> Check:
    """Require the mark of a postscript; marks are patterns, as published."""
    marker = text(arguments, "postscript_marker").strip()
    if marker in _POSTSCRIPTS:
        pattern = re.compile(_POSTSCRIPTS[marker])
        return lambda answer: pattern.search(answer.lower()) is not None
    counted = CountedPattern(marker.lower())
    return lambda answer: bool(counted.count(answer.lower()))


def number_bullet_lists(arguments: Mapping[str, Any]) -> Check:
    """Require an exact number of lines that begin with a star or a dash."""
    num_bullets = number(arguments, "num_bullets")
    return lambda answer: (
        sum(1 for pattern in (_STARS, _DASHES) for _ in pattern.finditer(answer)) == num_bullets
    )


def constrained_response(arguments: Mapping[str, Any]) -> Check:
    """Require one of three sentences."""
    return lambda answer: any(option in answer for option in _OPTIONS)


def number_highlighted_sections(arguments: Mapping[str, Any]) -> Check:
    """Require at least a number of texts between stars; texts between double stars count too."""
    num_highlights = number(arguments, "num_highlights")

    def check(answer: str) -> bool:
        single = (match[0].strip("*") for match in _HIGHLIGHT.finditer(answer))
        double = (match[0][2:-2] for match in _DOUBLE.finditer(answer))
        return (
            sum(bool(section.strip()) for part in (single, double) for section in part)
            >= num_highlights
        )

    return check


def multiple_sections(arguments: Mapping[str, Any]) -> Check:
    """Require at least a number of marks such as "Section 2"; the word is a pattern."""
    num_sections, word = (
        number(arguments, "num_sections"),
        text(arguments, "section_spliter").strip(),
    )
    mark = CountedPattern(word, r"\s?{}\s?\d+\s?")
    return lambda answer: (mark.count(answer) or 0) >= num_sections


def json_format(arguments: Mapping[str, Any]) -> Check:
    """Require that the whole answer is JSON, with or without a fence."""

    def check(answer: str) -> bool:
        inner = answer.strip()
        # Remove each in turn, so that an unmarked fence may follow a marked one.
        for fence in ("```json", "```Json", "```JSON", "```"):
            inner = inner.removeprefix(fence)
        try:
            json.loads(inner.removesuffix("```").strip())
        except (ValueError, RecursionError):
            return False
        return True

    return check


def title(arguments: Mapping[str, Any]) -> Check:
    """Require a line with a text between << and >>."""

    def has_title(line: str) -> bool:
        start, end = line.find("<<"), line.rfind(">>")
        mark = line[start : end + 2].lstrip("<").rstrip(">")
        return start >= 0 and end >= start + 3 and bool(mark.strip())

    return lambda answer: any(map(has_title, answer.split("\n")))


def two_responses(arguments: Mapping[str, Any]) -> Check:
    """Require two different texts with ****** between them; only the ends may be empty."""

    def check(answer: str) -> bool:
        parts = [part.strip() for part in answer.split(_RESPONSES)]
        filled = [part for part in parts if part]
        return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]

    return check


def repeat_prompt(arguments: Mapping[str, Any]) -> Check:
    """Require that the answer begins with the request, ignoring case."""
    request = text(arguments, "prompt_to_repeat").strip().lower()
    return lambda answer: answer.strip().lower().startswith(request)


def end_checker(arguments: Mapping[str, Any]) -> Check:
    """Require that the answer ends with a phrase, ignoring case and quotation marks after it."""
    phrase = text(arguments, "end_phrase").strip().lower()
    return lambda answer: answer.strip().strip('"').lower().endswith(phrase)


def quotation(arguments: Mapping[str, Any]) -> Check:
    """Require that the whole answer is between double quotation marks."""

    def check(answer: str) -> bool:
        inner = answer.strip()
        return len(inner) > 1 and inner[0] == inner[-1] == '"'

    return check


_WORD: Final = re.compile(r"\w+")
_DIVIDER: Final = re.compile(r"\s?\*\*\*\s?")
_AFTER_WORD: Final = re.compile("[.,?!'\"]")


def existence(arguments: Mapping[str, Any]) -> Check:
    """Require every keyword, ignoring case; keywords are patterns, as published."""
    patterns = [CountedPattern(word, ignore_case=True) for word in texts(arguments, "keywords")]
    return lambda answer: all(pattern.count(answer) for pattern in patterns)


def frequency(arguments: Mapping[str, Any]) -> Check:
    """Require a number of occurrences of a keyword."""
    word = CountedPattern(text(arguments, "keyword").strip(), ignore_case=True)
    holds = relation(arguments, "relation", number(arguments, "frequency"))

    def check(answer: str) -> bool:
        count = word.count(answer)
        return count is not None and holds(count)

    return check


def forbidden_words(arguments: Mapping[str, Any]) -> Check:
    """Require that no keyword occurs as a separate word."""
    words = [
        CountedPattern(word, r"\b{}\b", ignore_case=True)
        for word in texts(arguments, "forbidden_words")
    ]
    return lambda answer: all(pattern.count(answer) == 0 for pattern in words)


def letter_frequency(arguments: Mapping[str, Any]) -> Check:
    """Require a number of occurrences of a letter, ignoring case.

    If the argument is not a letter of the alphabet, the published code draws a letter at random.
    """
    letter = text(arguments, "letter").strip().lower()
    if len(letter) != 1:
        raise ValueError("the argument `letter` must be one letter")
    holds = relation(arguments, "let_relation", number(arguments, "let_frequency"))
    return lambda answer: holds(answer.lower().count(letter))


def number_words(arguments: Mapping[str, Any]) -> Check:
    """Require a number of words, which are runs of letters, digits and underscores."""
    holds = relation(arguments, "relation", number(arguments, "num_words"))
    return lambda answer: holds(sum(1 for _ in _WORD.finditer(answer)))


def number_paragraphs(arguments: Mapping[str, Any]) -> Check:
    """Require an exact number of paragraphs with *** between them; only the ends may be empty."""
    num_paragraphs = number(arguments, "num_paragraphs")

    def check(answer: str) -> bool:
        parts = _DIVIDER.split(answer)
        filled = [bool(part.strip()) for part in parts]
        return all(filled[1:-1]) and sum(filled) == num_paragraphs

    return check


def nth_paragraph_first_word(arguments: Mapping[str, Any]) -> Check:
    """Require a number of paragraphs between blank lines, one of which begins with a word."""
    num_paragraphs, nth = number(arguments, "num_paragraphs"), number(arguments, "nth_paragraph")
    word = text(arguments, "first_word").lower()

    def check(answer: str) -> bool:
        parts = answer.split("\n\n")
        filled = sum(bool(part.strip()) for part in parts)
        # `nth` counts blank paragraphs, the number does not, as published.
        if not 0 < nth <= filled or not parts[nth - 1].strip():
            return False
        first = parts[nth - 1].split(None, 1)[0].lstrip("'").lstrip('"')
        first = _AFTER_WORD.split(first, maxsplit=1)[0]
        return filled == num_paragraphs and "".join(letter.lower() for letter in first) == word

    return check


def no_comma(arguments: Mapping[str, Any]) -> Check:
    """Require that there is no comma."""
    return lambda answer: "," not in answer
