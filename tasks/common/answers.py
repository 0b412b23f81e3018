r"""Reading a number from model text; every function is total and takes linear time.

Two of the readers are lm-eval's filters, kept as they are so that published numbers compare. The
third, `numeric_answer`, is treegen's default. It knows that 18.00, $18 and 18 are one number.
"""

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from treegen.tasks.common.arithmetic import calculations, canonical_number, plain_digits, result

__all__ = [
    "canonical_number",
    "exact_match_form",
    "flexible_extract",
    "numeric_and_flexible",
    "numeric_answer",
    "strict_match",
]

_STRICT: Final = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")

_STATED: Final = re.compile(
    r"\bthe\s++(?:(?:final|correct)\s++)?+answer\s++is\b", re.ASCII | re.IGNORECASE
)
# How far before "answer" most of these begin.
_NEAR: Final = 24
_HASHES: Final = re.compile("####")
# What comes right before a number that is no answer, as before 5 in "not 5, it is 6" and before the
# 2 in "100 m^2".
_DENIED: Final = re.compile(r"(?:\bnot|n['\u2019]t)[ ]{1,3}$|[A-Za-z]\^$")
_DENIAL: Final = 8


def strict_match(text: str) -> str | None:
    """Return what lm-eval's gsm8k_cot filter `strict-match` finds first, unchanged."""
    match = _STRICT.search(text)
    return match[1] if match else None


def flexible_extract(text: str) -> str | None:
    """Return what lm-eval's filter `flexible-extract` finds last, unchanged."""
    size = 1
    while text:
        # Words from the end, ever more at once, as most texts end with their number.
        words = text.rsplit(None, size)
        text = words.pop(0) if len(words) > size else ""
        for word in reversed(words):  # a match has no spaces
            if last := (_known_last if len(word) <= _SHORT else _last)(word):
                return last
        size *= 8
    return None


def numeric_and_flexible(text: str) -> tuple[str | None, str | None]:
    """Return what `numeric_answer` and `flexible_extract` do.

    Most texts end with the answer that they state, and many with the same one. What is before it
    changes neither, so such ends are read once.
    """
    start = text.rfind("he answer is ") - 1
    if start == 0 or (start > 0 and text[start - 1] in " \n"):
        end = text[start:]
        if len(end) <= _SHORT and (found := _known_end(end)):
            return found
    return numeric_answer(text), flexible_extract(text)


def _end(text: str) -> tuple[str | None, str | None] | None:
    """Return both readings of the end of a text, if they follow from it alone."""
    stated, last = _after_stated(plain_digits(text)), flexible_extract(text)
    return None if stated is None or last is None else (stated[0], last)


def exact_match_form(answer: str) -> str:
    r"""Return the string that lm-eval's exact_match compares.

    It removes commas, dollar signs, everything up to the last "#### " and one final period. This
    does not use lm-eval's expression `(?s).*#### `, which takes quadratic time on a long answer.
    """
    plain = answer.replace(",", "").replace("$", "")
    return plain.rpartition("#### ")[2].removesuffix(".").lower()


def numeric_answer(text: str) -> str | None:
    """Return the number that a text gives as its answer, in canonical form.

    That is the number after the last "the answer is" with a number in its line; else the number
    after the last "####" with a number in its line; else the last number of the text. A number
    after "not" does not count. A calculation, as in "the answer is 20% of 50 = 10" or "3/4", counts
    as its exact result.
    """
    text = plain_digits(text)
    if found := _after_stated(text) or _after_hashes(text):
        return found[0]
    stop = len(text)
    while stop >= 0:  # no calculation goes over the end of a line
        start = text.rfind("\n", 0, stop) + 1
        if last := deque(_meant(text, start, stop), maxlen=1):
            return result(last[0], last=True)
        stop = start - 1
    return None


def _last(word: str) -> str | None:
    found = deque(_FLEXIBLE.finditer(word), maxlen=1)
    return found[0][0] if found else None


# Words and lines at the ends of a run's texts are alike.
_SHORT: Final = 64
_known_last: Final = lru_cache(maxsize=1 << 14)(_last)
_known_end: Final = lru_cache(maxsize=1 << 14)(_end)


def _after_stated(text: str) -> tuple[str | None] | None:
    """Return the answer after the last "the answer is" that has a number; it may be None."""
    # Finding fixed words and matching there takes a quarter of the time of searching.
    lower = text.replace("\u0130", "I").lower()  # of no other letter is that longer than one
    stop = len(text)
    at = lower.rfind("answer")
    while at >= 0:
        start = lower.rfind("the", max(at - _NEAR, 0), at)
        match = _STATED.match(text, start) if start >= 0 else None
        before = -2
        if match is None or match.end() < at:  # it may also stand far away, or be of another answer
            before = lower.rfind("answer", 0, at)
            start = lower.rfind("the", max(before, 0), at)
            match = _STATED.match(text, start) if start >= 0 else None
        if match is not None:
            if found := _answer_of(text, start, match.end(), stop):
                return found
            stop = start
        at = lower.rfind("answer", 0, at) if before == -2 else before
    return None


def _after_hashes(text: str) -> tuple[str | None] | None:
    """Return the answer after the last "####" that has a number; it may be None."""
    stop = len(text)
    for match in reversed([*_HASHES.finditer(text)]) if "####" in text else ():
        if found := _answer_of(text, match.start(), match.end(), stop):
            return found
        stop = match.start()
    return None


def _answer_of(text: str, start: int, after: int, stop: int) -> tuple[str | None] | None:
    """Return the answer that a marker has, which may be None; None if it has no number.

    start, after: where the marker stands. stop: where the next one begins. Each owns the text up to
    that or the end of its line, so no text is read twice.
    """
    newline = text.find("\n", after, stop)
    own = text[start : stop if newline < 0 else newline]
    # Samples of a problem state few answers.
    return (_known_first if len(own) <= _SHORT else _first)(own, after - start)


def _first(text: str, start: int) -> tuple[str | None] | None:
    found = next(_meant(text, start, len(text)), None)
    return None if found is None else (result(found, last=False),)


_known_first: Final = lru_cache(maxsize=1 << 14)(_first)


def _meant(text: str, start: int, stop: int) -> Iterator[str]:
    for found in calculations(text, start, stop):
        at = found.start()
        if not _DENIED.search(text, max(at - _DENIAL, 0), at):
            yield found[0]
