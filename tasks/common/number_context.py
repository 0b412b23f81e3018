r"""Whether a number found in a text is a complete expression or only the part that could be parsed.

The arithmetic of this package parses only a part of "2\pi" or "1 + 2 + ... + n". To take the part
for the answer would be wrong, so these functions check the text around it. They read a bounded
window, so a text is read in linear time.
"""

import re
from typing import Final

from treegen.tasks.common.arithmetic import calculations, canonical_number, result, states_result

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
