r"""Reading a number from model text; every function is total and takes linear time.

Two of the readers are lm-eval's filters, kept bit for bit so that published numbers compare. The
third, `numeric_answer`, is our default: it knows that 18.00, $18 and 18 are one number.
"""

import re
from collections import deque
from typing import Final

# Longer numbers are no answer; this also keeps what is stored about a sample small.
MAX_DIGITS: Final = 100

_STRICT: Final = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_FLEXIBLE: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")

# ASCII digits only: \d and int() also take digits of other scripts, and a number that touches one
# is not the number that was written. A minus after a digit, a letter or a bracket subtracts.
# Possessive repeats (++, ?+) never give back what they matched, which keeps the scan linear; the
# groups of three give back at most one, and must: else 1,000,000,...,0000 is read again from each.
_NUMBER: Final = re.compile(
    r"""
    (?P<minus>(?<![\w)\]}%$])[-\u2212])?+
    (?:\\?[$\u20ac\u00a3])?+ (?P<inner>(?<=[$\u20ac\u00a3])[-\u2212])?+
    (?<!\d)
    (?: (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++) (?P<part>\.[0-9]++)?+
      | (?P<only>\.[0-9]++) )
    (?P<exponent>[eE][-+]?+[0-9]++)?+
    (?!\d)
    """,
    re.VERBOSE,
)
_STATED: Final = re.compile(
    r"\bthe\s++(?:(?:final|correct)\s++)?+answer\s++is\b", re.ASCII | re.IGNORECASE
)
_HASHES: Final = re.compile("####")
# "3 - 2 = 1": a number and what follows it up to the last equals sign of its calculation.
_CALCULATION: Final = re.compile(r"(?:[0-9\s$()+*/x\u00d7\u00f7\u2212=%-]|[.,](?=[0-9]))*=[\s*]*+")


def strict_match(text: str) -> str | None:
    """Return what lm-eval's gsm8k_cot filter `strict-match` finds first, as it stands there."""
    match = _STRICT.search(text)
    return match[1] if match else None


def flexible_extract(text: str) -> str | None:
    """Return what lm-eval's filter `flexible-extract` finds last, as it stands there."""
    last = _last(_FLEXIBLE, text)
    return last[0] if last else None


def exact_match_form(answer: str) -> str:
    r"""Return the string that lm-eval's exact_match compares.

    It removes commas, dollar signs, everything up to the last "#### " and one final period. Done
    without its expression `(?s).*#### `, which takes quadratic time on a long answer.
    """
    plain = answer.replace(",", "").replace("$", "")
    return plain.rpartition("#### ")[2].removesuffix(".").lower()


def numeric_answer(text: str) -> str | None:
    """Return the number that a text gives as its answer, in canonical form.

    That is the number after the last "the answer is" that has one in its line, else after the last
    "####" that has one, else the last number of all. Of a calculation, as in "the answer is
    3 - 2 = 1", it is the result.
    """
    for marker in (_STATED, _HASHES):
        found = _last_marked(text, marker)
        if found:
            return _canonical(found)
    last = _last(_NUMBER, text)
    return _canonical(last) if last else None


def canonical_number(text: str) -> str | None:
    """Return the canonical form if the whole text is one number, as in "$1,000.50" or "25%".

    Equal numbers, and no others, have equal forms: no sign on zero, no grouping, no exponent, no
    zeros that do not count.
    """
    bare = text.strip().removesuffix("%").rstrip()
    match = _NUMBER.fullmatch(bare)
    return _canonical(match) if match else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _last_marked(text: str, marker: re.Pattern[str]) -> re.Match[str] | None:
    # Each marker owns the text up to the next one or the end of its line, so no text is read twice.
    stop = len(text)
    for start, after in reversed([match.span() for match in marker.finditer(text)]):
        newline = text.find("\n", after, stop)
        found = _NUMBER.search(text, after, stop if newline < 0 else newline)
        if found:
            return _result(text, found, stop if newline < 0 else newline)
        stop = start
    return None


def _result(text: str, number: re.Match[str], stop: int) -> re.Match[str]:
    calculation = _CALCULATION.match(text, number.start(), stop)
    if not calculation:
        return number
    return _NUMBER.match(text, calculation.end(), stop) or number


def _canonical(number: re.Match[str]) -> str | None:
    whole = (number["whole"] or "").replace(",", "").lstrip("0")
    part = (number["part"] or number["only"] or ".")[1:].rstrip("0")
    exponent = number["exponent"]
    if exponent:
        size = exponent[1:].lstrip("+-").lstrip("0")
        # Before int(): it refuses thousands of digits, and zeros would be written out.
        if len(size) > 3:
            return None
        shift = int(size or "0") * (-1 if exponent[1] == "-" else 1)
        if abs(shift) > MAX_DIGITS:
            return None
        whole, part = _shift(whole, part, shift)
    if len(whole) + len(part) > MAX_DIGITS:
        return None
    if not whole and not part:
        return "0"
    sign = "-" if bool(number["minus"]) != bool(number["inner"]) else ""
    return f"{sign}{whole or '0'}{'.' if part else ''}{part}"


def _shift(whole: str, part: str, shift: int) -> tuple[str, str]:
    """Move the decimal point to the right by shift places."""
    if shift >= 0:
        part = part.ljust(shift, "0")
        return (whole + part[:shift]).lstrip("0"), part[shift:]
    whole = whole.rjust(-shift, "0")
    return whole[:shift].lstrip("0"), (whole[shift:] + part).rstrip("0")
