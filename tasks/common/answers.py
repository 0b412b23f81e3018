r"""Reading a number from model text; every function is total and takes linear time.

Two of the readers are lm-eval's filters. They stay unchanged so that results can be compared with
published numbers. The third, `numeric_answer`, is treegen's default: it treats 18.00, $18 and 18 as
one number.

The arithmetic of this package parses only a part of "2\pi" or "1 + 2 + ... + n". To take the part
for the answer would be wrong, so some functions check the text around it, in a bounded window.
"""

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import filterfalse
from typing import Final

from treegen.tasks.common.arithmetic import (
    calculations,
    canonical_number,
    plain_digits,
    result,
    states_result,
)
from treegen.tasks.common.letters import is_hedged

# Number of characters that are read before and after a number.
_WINDOW: Final = 48
_FUNCTION: Final = (
    r"(?:\\(?:sqrt|[dtc]?frac|d?binom|pi|theta|alpha|beta|lambda|mu|phi|ln|log|exp|sin|cos|tan|sum"
    r"|prod|int|infty|[lcv]?dots|lfloor|lceil)(?![A-Za-z])|[\u221a\u03c0\u221e\u2026]|\.{2,})"
)
_VARIABLE: Final = r"\(?[b-hj-z](?![A-Za-z'\u2019])"
# Text after a number that continues the expression.
_GOES_ON: Final = re.compile(
    rf"""
    [)\]}}]{{0,4}}+[ \t]{{0,4}}+
    (?: \^ | \*\*(?=[0-9(]) | \\pm | \u00b1 | \\(?:pi|sqrt|[dtc]?frac|theta)(?![A-Za-z])
      | [\u221a\u03c0] | !(?=[ \t]?[$)}}=*/+])
      | (?:[+/\u00d7\u00f7\u00b7]|\\times|\\cdot|\\div) [ \t]{{0,4}}+ {_FUNCTION}
      | (?:\+|\u00d7|\u00f7|\\times|\\cdot|\\div) [ \t]{{0,4}}+ {_VARIABLE}
      | \*[ \t]? {_FUNCTION} | \*{_VARIABLE} | [-\u2212][ \t]?{_FUNCTION} )
    | [ \t]{{1,4}}[-\u2212][ \t]{{1,4}}{_VARIABLE}
    | [.,:][0-9] | [inyz](?![A-Za-z0-9]) | x(?=[ \t]?[-+*/^=$}})\u2212])
    """,
    re.VERBOSE,
)
# Text right before a number that belongs to the same expression. A plus after a space, with no
# space after it, is a sign, as in "is +5".
_CAME_FROM: Final = re.compile(
    rf"""
    (?: [\^_]\{{? | \\(?:sqrt(?:\[[0-9]\])?|[dtc]?frac|d?binom|ln|exp|sin|cos|tan|pm)\{{?
      | \\log(?:_\{{?[0-9a-z]{{0,3}}\}}?)?
      | [\u221a\u00b1\u00d7\u00f7\u00b7] | \b(?:sqrt|log|ln|sin|cos|tan|exp)(?=\(|[ ]|$)
      | [\w)\]}}.\u2026]\+ | [ \t]\+[ \t] | \\(?:times|cdot|div)
      | (?<![A-Za-z])[A-Za-z)\]}}][ \t]{{1,4}}[-\u2212][ \t]{{1,4}} | [A-Za-z)\]}}]\*
      | (?:(?<![A-Za-z])[A-Za-z]|[)\]}}])/ | [0-9][:.,] | {_FUNCTION}[ \t]?[-+*/\u00d7\u2212] )
    [ \t($\{{\\]{{0,6}}\Z
    """,
    re.VERBOSE,
)
_SKIPPED: Final = re.compile(r"[A-Za-z]\}?[\^_]\{?\Z")
_DENIED: Final = re.compile(
    r"(?:\b(?:not|never|neither|nor)|n['\u2019]t|\brather[ ]than|\binstead[ ]of)"
    r"(?:[ ](?:be|equal[ ]to|exactly|just|only))?[ ]{1,3}\Z",
    re.IGNORECASE,
)
_STATES: Final = re.compile(r"(?:=|\u2248|\u2243|\\approx|\\simeq)[ \t*$({\\]{0,8}\Z")
_NUMBER: Final = r"[($\[{\\-]{0,3}[0-9]{1,20}(?:[.,/][0-9]{1,20}){0,6}%?[)$\]}*]{0,4}"
# More numbers up to the end of a sentence: "3, 4 and 5." If words follow, they are not a list.
_LIST: Final = re.compile(
    r"[)$*\]}]{0,4}(?:[ \t]*+(?:,|;|,?[ \t]*+\b(?:and|or)\b)[ \t]*+"
    rf"(?:{_NUMBER}|\.{{3}}|\\[lc]?dots)"
    r"){1,50}+[ \t]*+(?=\n|\Z|[.!?](?:\s|\Z))"
)
_RANGE: Final = re.compile(
    r"[)$%*\]}]{0,4}(?:[ \t](?:dollars|percent))?[ \t](?P<or>or|to|\u2013)[ \t]"
    rf"(?P<other>{_NUMBER})"
)
_BETWEEN: Final = re.compile(r"\bbetween[ \t(*$]{1,6}\Z")
_UNITS: Final = (
    ("years?", "months?"),
    ("weeks?", "days?"),
    ("days?", "hours?"),
    ("(?:hours?|hrs?|h)", "(?:minutes?|mins?|m)"),
    ("(?:minutes?|mins?)", "(?:seconds?|secs?)"),
    ("(?:feet|foot|ft)", "(?:inch(?:es)?|in)"),
    ("(?:pounds?|lbs?)", "(?:ounces?|oz)"),
    ("dollars?", "cents?"),
)
# "2 hours and 30 minutes" is not one number.
_COMPOUND: Final = tuple(
    (
        re.compile(rf"[ ]?{large}(?:,?[ ]and)?[ ][0-9.]{{1,9}}[ ]?{small}\b"),
        re.compile(rf"[0-9][ ]?{large}(?:,?[ ]and)?[ ]\Z"),
        re.compile(rf"[ ]?{small}\b"),
    )
    for large, small in _UNITS
)


def is_denied(text: str, match: re.Match[str]) -> bool:
    """Return whether a number must be ignored, as the 5 in "not 5" or the 2 in "100 m^2"."""
    before = text[max(match.start() - _WINDOW, 0) : match.start()]
    if _DENIED.search(before):
        return True
    return bool(_SKIPPED.search(before)) and not states_result(match[0])


def is_stated(text: str, match: re.Match[str]) -> bool:
    """Return whether a calculation ends with a result, or follows a sign of equality."""
    return states_result(match[0]) or bool(
        _STATES.search(text[max(match.start() - _WINDOW, 0) : match.start()])
    )


def is_whole(text: str, match: re.Match[str]) -> bool:
    """Return whether a calculation is all of its expression, or states the expression's result."""
    after = text[match.end() : match.end() + _WINDOW]
    if _GOES_ON.match(after):
        return False
    if is_stated(text, match):
        return True
    before = text[max(match.start() - _WINDOW, 0) : match.start()]
    if match[0][0] == "." and before[-1:].isdigit():
        return False
    return not _CAME_FROM.search(before) and not any(
        larger.match(after) or (left.search(before) and right.match(after))
        for larger, left, right in _COMPOUND
    )


def is_one_of_several(text: str, match: re.Match[str]) -> bool:
    """Return whether equally good numbers follow, as in "3, 4 and 5", "5 or 6" or "5 to 10"."""
    end = match.end()
    if _BETWEEN.search(text[max(match.start() - _WINDOW, 0) : match.start()]):
        return True
    if other := _RANGE.match(text, end):
        return other["or"] != "or" or not _are_equal(text, match, other.start("other"))
    return bool(_LIST.match(text, end))


def _are_equal(text: str, match: re.Match[str], at: int) -> bool:
    """Return whether the calculation at index `at` has the same value; 50% equals 0.5."""
    other = next(calculations(text, at), None)
    if other is None:
        return False
    values = result(match[0]), result(other[0])
    shares = ["%" in number[0] for number in (match, other)]
    if None in values or shares == [True, True]:
        return values[0] == values[1]
    forms = {
        canonical_number(f"{value}e-2") if share and "/" not in str(value) else value
        for value, share in zip(values, shares, strict=True)
    }
    return len(forms) == 1 or values[0] == values[1]


_STRICT: Final = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")

# "The answer is", "the final answer would be", "Final answer:".
_STATED: Final = re.compile(
    r"answer[*_]*+(?:\s++(?:is|equals|(?:would|will|must|should)\s++be)\b"
    r"|(?<=[Ff]inal\sanswer)[*_ ]*+[:=])",
    re.ASCII | re.IGNORECASE,
)
# Words allowed before "answer": "the third answer is 5" does not state the final answer.
_LED: Final = re.compile(
    r"(?:\b(?:the|my|our|final|correct|right)\s++|\A\s*+|[^\w\s]\s*+|\n\s*+)$", re.IGNORECASE
)
_LEAD: Final = 24
_BOXED: Final = "\\boxed{"
_HASHES: Final = re.compile("####")
# "Answer: 15 dollars" on a line of its own. The number in a longer line may be a step.
_ANSWER_LINE: Final = re.compile(
    r"^[ \t*_#>]*+answer[*_ ]*+:"
    r"(?P<rest>[ \t*_$\\({]*+[-\u2212]?\\?[$\u20ac\u00a3]?[0-9.][^=\n]*+)$",
    re.MULTILINE | re.IGNORECASE,
)
_FEW_WORDS: Final = re.compile(r"[)}$*_\\]*+(?:[ \t]*+[^\s0-9=(]{1,20}){0,4}+[ \t]*+(?:\(|\Z)")
_SENTENCE_END: Final = re.compile(r"(?<!\.)[.!?][)*\"']*\s(?!=)")


def strict_match(text: str) -> str | None:
    """Return the first match of lm-eval's gsm8k_cot filter `strict-match`, unchanged."""
    match = _STRICT.search(text)
    return match[1] if match else None


def flexible_extract(text: str) -> str | None:
    """Return the last match of lm-eval's filter `flexible-extract`, unchanged."""
    size = 1
    while text:
        # Read words from the end, in growing blocks, because most texts end with their number.
        words = text.rsplit(None, size)
        text = words.pop(0) if len(words) > size else ""
        for word in reversed(words):  # a match has no spaces
            if last := (_cached_last if len(word) <= _MAX_CACHED_CHARS else _find_last_number)(
                word
            ):
                return last
        size *= 8
    return None


def numeric_and_flexible(text: str) -> tuple[str | None, str | None]:
    """Return the results of `numeric_answer` and `flexible_extract`.

    Most texts end with a sentence that states the answer, and many of these sentences are equal.
    Text before that sentence changes neither result, so results for short endings are cached.
    """
    start = text.rfind("he answer is ") - 1
    if start == 0 or (start > 0 and text[start - 1] in " \n" and not is_hedged(text, start + 4)):
        end = text[start:]
        if len(end) <= _MAX_CACHED_CHARS and (number := _cached_end(end)):
            return number
    return numeric_answer(text), flexible_extract(text)


def _end(text: str) -> tuple[str | None, str | None] | None:
    """Return both results for the end of a text; None if earlier text could change them."""
    stated, last = _find_marked(plain_digits(text)), flexible_extract(text)
    return None if stated is None or last is None else (stated[0], last)


def exact_match_form(answer: str) -> str:
    r"""Return the string that lm-eval's exact_match compares.

    Commas, dollar signs, everything up to the last "#### " and one final period are removed.
    lm-eval's expression `(?s).*#### ` is not used: it takes quadratic time on a long answer.
    """
    plain = answer.replace(",", "").replace("$", "")
    return plain.rpartition("#### ")[2].removesuffix(".").lower()


def numeric_answer(text: str) -> str | None:
    r"""Return the number that a text gives as its answer, in canonical form.

    Uses the first of these places that has a number:

    - the later one of the last \boxed{...} and the last "the answer is ...";
    - the text after the last "####";
    - a line "Answer: ..." with a number and at most four words;
    - the last number of the text.

    A number after "not" does not count, nor does "the answer is" after "if" or "I don't think". A
    calculation, as in "the answer is 20% of 50 = 10" or "3/4", counts as its exact result. An
    expression that cannot be read completely ("2\pi"), or several numbers ("5 or 6"), give None
    unless a result follows "=".
    """
    text = plain_digits(text)
    if number := _find_marked(text) or _after_hashes(text) or _answer_line(text):
        return number[0]
    stop = len(text)
    while stop >= 0:  # a calculation never continues on the next line
        start = text.rfind("\n", 0, stop) + 1
        if last := deque(_iterate_asserted(text, start, stop), maxlen=1):
            return result(last[0][0]) if is_whole(text, last[0]) else None
        stop = start - 1
    return None


def _find_last_number(word: str) -> str | None:
    matches = deque(_FLEXIBLE.finditer(word), maxlen=1)
    return matches[0][0] if matches else None


# The texts of a run often end with the same words and lines, so short ones are cached.
_MAX_CACHED_CHARS: Final = 64
_cached_last: Final = lru_cache(maxsize=1 << 14)(_find_last_number)
_cached_end: Final = lru_cache(maxsize=1 << 14)(_end)


def _find_marked(text: str) -> tuple[str | None] | None:
    r"""Return the last boxed or stated answer that has a number.

    The result is None without such an answer, and (None,) if the number is ambiguous or incomplete.
    """
    at, boxed = _find_boxed(text)
    return _after_stated(text, at) or boxed


def _find_boxed(text: str) -> tuple[int, tuple[str | None] | None]:
    r"""Return where the last \boxed{...} with a number begins, and the number, which may be None.

    Each box is read up to the start of the next one, so no text is read twice.
    """
    stop = len(text)
    while (at := text.rfind(_BOXED, 0, stop)) >= 0:
        end = _find_closing_brace(text, at + len(_BOXED), stop)
        if end and (number := _read_single_number(text[at : end + 1])):
            return at, number
        stop = at
    return 0, None


def _find_closing_brace(text: str, start: int, stop: int) -> int:
    """Return where the brace open at `start` closes; 0 if it does not before `stop`."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start, stop):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    return 0


def _read_single_number(box: str) -> tuple[str | None] | None:
    """Return (number,) for a box with one number, (None,) for several numbers, None without one."""
    answer, end = _first_of(box, len(_BOXED))
    if not end:
        return None
    return (None,) if next(_iterate_asserted(box, end, len(box)), None) else (answer,)


def _after_stated(text: str, stop_at: int) -> tuple[str | None] | None:
    """Return the answer after the last "the answer is" that has a number; it may be None.

    Args:
        text: Text from `plain_digits`.
        stop_at: Index at which the backward search ends.
    """
    # Finding a fixed word and matching there takes a quarter of the time of a regex search.
    lower = text.replace("\u0130", "I").lower()  # lower() makes no other letter longer
    stop = at = len(text)
    while (at := lower.rfind("answer", stop_at, at)) >= 0:
        match = _STATED.match(text, at)
        if match is None:
            continue
        led = _LED.search(text[max(at - _LEAD, 0) : at]) and not is_hedged(text, at)
        if led and (number := _answer_of(text, at, match.end(), stop)):
            return number
        stop = at
    return None


def _answer_line(text: str) -> tuple[str | None] | None:
    """Return the number on the last short line "Answer: ..."; it may be None."""
    for line in reversed([*_ANSWER_LINE.finditer(text)]):
        answer, end = _first_of(line[0], line.start("rest") - line.start())
        if end and _FEW_WORDS.match(line[0], end):
            return (answer,)
    return None


def _after_hashes(text: str) -> tuple[str | None] | None:
    """Return the answer after the last "####" that has a number; it may be None."""
    stop = len(text)
    for match in reversed([*_HASHES.finditer(text)]) if "####" in text else ():
        if number := _answer_of(text, match.start(), match.end(), stop):
            return number
        stop = match.start()
    return None


def _answer_of(text: str, start: int, after: int, stop: int) -> tuple[str | None] | None:
    """Return the answer after a marker, which may be None; return None if it has no number.

    Args:
        text: Text from `plain_digits`.
        start: Index where the marker begins.
        after: Index where the marker ends.
        stop: Index where the next marker begins. Only text up to there, or up to the end of the
            line, is read, so no text is read twice.
    """
    newline = text.find("\n", after, stop)
    part = text[start : stop if newline < 0 else newline]
    # Samples of one problem state few different answers, so results for short texts are cached.
    return (_cached_first if len(part) <= _MAX_CACHED_CHARS else _first)(part, after - start)


def _first(text: str, start: int) -> tuple[str | None] | None:
    answer, end = _first_of(text, start)
    return (answer,) if end else None


_cached_first: Final = lru_cache(maxsize=1 << 14)(_first)


def _first_of(text: str, start: int) -> tuple[str | None, int]:
    """Return the first number that is meant as an answer, and where it ends (0 if there is none).

    The number is None if it is only part of an expression without a stated result, or one of
    several.
    """
    end = 0
    for match in _iterate_asserted(text, start, len(text)):
        if end and _SENTENCE_END.search(text, end, match.start()):
            break
        if not is_whole(text, match):
            end = match.end()
        elif end and not is_stated(text, match):
            break
        elif not is_stated(text, match) and is_one_of_several(text, match):
            return None, match.end()
        else:
            return result(match[0]), match.end()
    return None, end


def _iterate_asserted(text: str, start: int, stop: int) -> Iterator[re.Match[str]]:
    return filterfalse(partial(is_denied, text), calculations(text, start, stop))
