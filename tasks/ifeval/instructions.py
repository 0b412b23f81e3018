"""The 25 kinds of instructions, by their names in the data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from treegen.tasks.ifeval import checks, language, sentences
from treegen.tasks.ifeval.checks import Check

Make = Callable[[Mapping[str, Any]], Check]

_KINDS: Final[Mapping[str, Make]] = {
    "keywords:existence": checks.existence,
    "keywords:frequency": checks.frequency,
    "keywords:forbidden_words": checks.forbidden_words,
    "keywords:letter_frequency": checks.letter_frequency,
    "language:response_language": language.response_language,
    "length_constraints:number_paragraphs": checks.number_paragraphs,
    "length_constraints:number_words": checks.number_words,
    "length_constraints:nth_paragraph_first_word": checks.nth_paragraph_first_word,
    "detectable_content:number_placeholders": checks.number_placeholders,
    "detectable_content:postscript": checks.postscript,
    "detectable_format:number_bullet_lists": checks.number_bullet_lists,
    "detectable_format:constrained_response": checks.constrained_response,
    "detectable_format:number_highlighted_sections": checks.number_highlighted_sections,
    "detectable_format:multiple_sections": checks.multiple_sections,
    "detectable_format:json_format": checks.json_format,
    "detectable_format:title": checks.title,
    "combination:two_responses": checks.two_responses,
    "combination:repeat_prompt": checks.repeat_prompt,
    "startend:end_checker": checks.end_checker,
    "startend:quotation": checks.quotation,
    "change_case:english_capital": language.english_capital,
    "change_case:english_lowercase": language.english_lowercase,
    "punctuation:no_comma": checks.no_comma,
}
_BY_SENTENCES: Final[Mapping[str, Callable[[Mapping[str, Any], str], Check]]] = {
    "length_constraints:number_sentences": sentences.number_sentences,
    "change_case:capital_word_frequency": sentences.capital_word_frequency,
}
KINDS: Final = frozenset(_KINDS) | frozenset(_BY_SENTENCES)
NEED_SENTENCES: Final = frozenset(_BY_SENTENCES)
NEED_LANGUAGE: Final = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)


def make_check(kind: str, given: Mapping[str, Any], way: str) -> Check:
    """Return the check of an instruction.

    Args:
        kind: Name of the instruction, one of KINDS.
        given: Its arguments; those that are None are ignored.
        way: How sentences are split, "punkt" or "rule".

    Raises:
        ValueError: There is no such kind, or an argument is missing or invalid.
    """
    present = {name: value for name, value in given.items() if value is not None}
    if kind in _BY_SENTENCES:
        return partial(_passes_if_not_blank, _BY_SENTENCES[kind](present, way))
    if kind not in _KINDS:
        raise ValueError(f"there is no instruction {kind!r:.60}")
    return partial(_passes_if_not_blank, _KINDS[kind](present))


def _passes_if_not_blank(check: Check, answer: str) -> bool:
    """Return whether an answer is not blank and passes a check."""
    return bool(answer.strip()) and check(answer)


def followed_loosely(check: Check, answer: str) -> bool:
    """Return whether an answer passes a check, with or without text that models often add.

    Forms without the first line, the last line or both are tried, and each of these without stars.
    """
    return any(check(variant) for variant in variants(answer))


def variants(answer: str) -> Sequence[str]:
    """Return the forms of an answer that the loose rule tries, without repeats."""
    lines = answer.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    plain = [answer, *cut]
    return list(dict.fromkeys([*plain, *(form.replace("*", "") for form in plain)]))
