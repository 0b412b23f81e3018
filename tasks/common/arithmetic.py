r"""Numbers and calculations as models write them: their exact values and canonical forms.

A calculation is numbers with signs between them, such as `20% of 50 = 10`, `3 apples x 4 = 12` or
`\frac{3}{4}`. Every function here is total and takes linear time.
"""

import operator
import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Final

# A number with more digits is not an answer. This also bounds what is stored about a sample.
MAX_DIGITS: Final = 100
# Maximum bits of an intermediate value, and maximum numbers and signs in a calculation.
_MAX_BITS: Final = 4096
_MAX_TOKENS: Final = 500

_GROUPS: Final = "|".join(
    rf"(?:{mark}[0-9]{{3}})+" for mark in (",", r"\{,\}", r"\\,", "[ \xa0\u2009\u202f]", "['_]")
)
# A minus after a digit, a letter or a bracket subtracts, so it is not part of the number.
# Possessive repeats (++, ?+) never backtrack, which keeps the scan linear. The groups of three give
# back one group at most. If they could give back none, the scan would read 1,000,000,...,0000 again
# from each group.
# A comma before one or two digits is a decimal comma, unless several follow, as in a list.
_NUMBER_PATTERN: Final = rf"""
    (?P<minus>(?<![\w)\]}}%$])[-\u2212])?+
    (?:\\?[$\u20ac\u00a3])?+ (?P<inner>(?<=[$\u20ac\u00a3])[-\u2212])?+
    (?: (?P<whole>[0-9]{{1,3}}(?:{_GROUPS})(?![0-9]|-[A-Za-z])|[0-9]++)
          (?P<part>\.[0-9]++
            |(?<![0-9],[0-9])(?<![0-9],[0-9]{{2}})(?<![0-9],[0-9]{{3}}),[0-9]{{1,2}}+(?!,?[0-9]))?+
      | (?P<only>\.[0-9]++) )
    (?P<exponent>[eE][-+]?+[0-9]++)?+
    (?: [ ](?P<over>[0-9]{{1,9}})/(?P<under>[0-9]{{1,9}})(?!/|\.?[0-9]) )?+
    """
_NUMBER: Final = re.compile(_NUMBER_PATTERN, re.VERBOSE)
_UNNAMED: Final = re.sub(r"\(\?P<\w+>", "(?:", _NUMBER_PATTERN)
# Spellings of operators. "of" is an operator only after a share, as in 20% of 50.
_POWER: Final = r"(?:\^|\*\*)"
_SIGN: Final = (
    r"(?:=|\+|\*(?!\*)|/(?![A-Za-z])|[-\u2212\u2013\u00d7\u00f7\u00b7]"
    r"|(?<![A-Za-z])[xX](?![A-Za-z])|\\(?:times|cdot|div)"
    r"|(?:(?<=%)|(?<=/[0-9]))[ ]?of(?:[ ]the)?\b)"
)
_CLOSED: Final = r"(?:\\?%)?+(?:[ ]?\)){0,8}+"
_UNIT: Final = r"(?:[ /]?[A-Za-z]{1,20}+(?:[ /][A-Za-z]{1,20}+)?)??"
# A bracket right after a number multiplies, as in 2(3 + 4).
_BETWEEN: Final = rf"(?:{_POWER}|(?=\()|{_UNIT}[ \t\xa0]{{0,4}}{_SIGN})"
_OPENED: Final = r"(?:[ \t\xa0(*$]|\\boxed\{){0,8}"
_CALCULATION: Final = re.compile(
    rf"""
    (?=[(\\$\u20ac\u00a3\u2212\-.0-9])  # what it may begin with, so that other places fail at once
    (?:\([ ]?){{0,8}}+ {_UNNAMED}
    (?: {_CLOSED} {_BETWEEN} {_OPENED} (?:{_UNNAMED}|(?!a[ ])[a-z](?![A-Za-z])) )*+
    {_CLOSED}
    """,
    re.VERBOSE,
)
_TOKEN: Final = re.compile(
    rf"(?P<number>{_UNNAMED})|{_POWER}|{_SIGN}|[()%]|(?P<name>(?<![A-Za-z])[a-z](?![A-Za-z]))",
    re.VERBOSE,
)
# 5-10 and 555-1234 are not differences, and 24/12/2020 is not a quotient, unless "=" follows.
_JOINED: Final = re.compile(
    r"\$?[0-9.,]++(?:[-\u2212\u2013]\$?[0-9.,]++)++|[0-9]++(?:/[0-9]++){2,}+"
)
# (3,5) is a pair, though 3,5 is a decimal.
_PAIR: Final = re.compile(r"\([ ]?[-\u2212]?[0-9]++,[0-9]{1,2}[ ]?\)")
_FRACTION: Final = re.compile(
    r"\\[dtc]?frac(?:\{([^{}\n]{1,60})\}\{([^{}\n]{1,60})\}|([0-9])([0-9]))"
)
_PLAIN_PART: Final = re.compile(r"[-\u2212]?[0-9]{1,20}")
_RAISED: Final = re.compile(r"\^\{[ ]?([-+\u2212]?[0-9]{1,20})[ ]?\}")
_SUPERSCRIPTS: Final = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+"
)
_SUPERSCRIPT: Final = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_VULGAR: Final = {
    sign: " " + unicodedata.normalize("NFKD", sign).replace("\u2044", "/")
    for sign in map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189))
}
_OTHER_MARKS: Final = str.maketrans(
    {
        **dict(zip("\u066a\u066b\u066c\u2044", "%.,/", strict=True)),
        **{chr(ord(mark) + 0xFEE0): mark for mark in "$%()*+,-./="},  # full-width forms
        **_VULGAR,
    }
)
_SAME: Final = {
    **dict(zip("\u2212\u2013\u00d7xX\u00b7\u00f7", "--****/", strict=True)),
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "**": "^",
}


def plain_digits(text: str) -> str:
    """Return a text with foreign digits and signs, and LaTeX fractions, written in ASCII.

    Powers are written with ^, so 10^{6} becomes 10^6.
    """
    if not text.isascii():
        text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)
        text = _SUPERSCRIPT.sub(lambda power: "^" + power[0].translate(_SUPERSCRIPTS), text)
        text = text.translate(_OTHER_MARKS)
    if "^{" in text:
        text = _RAISED.sub(r"^\1", text)
    return _FRACTION.sub(_as_quotient, text) if "frac" in text else text


def _as_quotient(fraction: re.Match[str]) -> str:
    top, bottom = fraction[1] or fraction[3], fraction[2] or fraction[4]
    if not (_PLAIN_PART.fullmatch(top) and _PLAIN_PART.fullmatch(bottom)):
        return f"({top})/({bottom})"
    # "1\frac{1}{2}" is 1 1/2.
    return " " * fraction.string[fraction.start() - 1 : fraction.start()].isdigit() + (
        f"{top}/{bottom}"
    )


def calculations(text: str, start: int = 0, stop: int | None = None) -> Iterator[re.Match[str]]:
    """Return the calculations and lone numbers in a text, in their order.

    Args:
        text: Text from `plain_digits`.
        start: Index at which the search starts.
        stop: Index at which the search ends; None for the end of the text.
    """
    return _CALCULATION.finditer(text, start, len(text) if stop is None else stop)


# Short calculations recur in the texts of a run, so they are cached; long ones rarely recur.
_MAX_CACHED_CHARS: Final = 64


def result(calculation: str) -> str | None:
    """Return the canonical form of a calculation's result, which is the value after its last "=".

    The result is None without a single value: for a range such as 5-10, a pair, or an unknown.
    """
    return (_cached_result if len(calculation) <= _MAX_CACHED_CHARS else _result)(calculation)


def states_result(calculation: str) -> bool:
    """Return whether a calculation has a number after its last "="."""
    _, equals, side = calculation.rpartition("=")
    return bool(equals and _NUMBER.search(side))


def _result(calculation: str) -> str | None:
    if _JOINED.fullmatch(calculation) or _PAIR.fullmatch(calculation):
        return None
    # The last side with a number counts: in "7 = x" this is the first side.
    sides = (side.lstrip(" \t\xa0*$") for side in reversed(calculation.split("=")))
    side = next(side for side in sides if _NUMBER.search(side))
    try:
        value = _evaluate(side)
    except ArithmeticError:
        return None
    return None if value is None else _form(value)


_cached_result = lru_cache(maxsize=1 << 14)(_result)


def canonical_number(text: str) -> str | None:
    """Return the canonical form if the whole text is one number, as in "$1,000.50", 25% or 3/4.

    Numbers have equal forms exactly if they are equal. A form has no sign on zero, no grouping, no
    exponent and no needless zeros. A fraction without a finite decimal is in lowest terms, as -1/3.
    """
    bare = plain_digits(text.strip()).strip().removesuffix("%").rstrip()
    over, slash, under = bare.partition("/")
    if (
        slash
        and (numerator := _NUMBER.fullmatch(over))
        and (denominator := _NUMBER.fullmatch(under))
    ):
        top, bottom = _value(numerator), _value(denominator)
        return _form(top / bottom) if top is not None and bottom else None
    match = _NUMBER.fullmatch(bare)
    value = _value(match) if match else None
    return None if value is None else _form(value)


def _value(number: re.Match[str]) -> Fraction | None:
    integer = re.sub("[^0-9]", "", number["whole"] or "").lstrip("0")
    part = (number["part"] or number["only"] or ".")[1:].rstrip("0")
    shift = _shift(number["exponent"] or "e0")
    if shift is None or len(integer) + len(part) > MAX_DIGITS:
        return None
    value = Fraction(int(f"{integer}{part}" or "0")) * Fraction(10) ** (shift - len(part))
    if number["under"]:
        if not int(number["under"]):
            return None
        value += Fraction(int(number["over"]), int(number["under"]))
    return -value if bool(number["minus"]) != bool(number["inner"]) else value


def _shift(exponent: str) -> int | None:
    size = exponent[1:].lstrip("+-").lstrip("0")
    # Check the length before int(), which raises an error for thousands of digits.
    if len(size) > 3 or int(size or "0") > MAX_DIGITS:
        return None
    return int(size or "0") * (-1 if exponent[1] == "-" else 1)


def _form(value: Fraction) -> str | None:
    """Return the canonical digits of a value; None if there are too many for an answer."""
    top, bottom = abs(value.numerator), value.denominator
    decimals = 0
    # A decimal is finite if the denominator has no prime factors except 2 and 5.
    twos = (bottom & -bottom).bit_length() - 1
    remainder, fives = bottom >> twos, 0
    while remainder % 5 == 0:
        remainder, fives = remainder // 5, fives + 1
    sign = "-" if value < 0 else ""
    if remainder == 1:
        decimals = max(twos, fives)
        top, bottom = top * 10 ** min(decimals, MAX_DIGITS) // bottom, 1
    if decimals > MAX_DIGITS or max(top, bottom) >= 10**MAX_DIGITS:
        return None
    if bottom > 1:
        return f"{sign}{top}/{bottom}"
    if not decimals:
        return f"{sign}{top}"
    digits = str(top).rjust(decimals + 1, "0")
    return f"{sign}{digits[:-decimals]}.{digits[-decimals:]}"


def _evaluate(side: str) -> Fraction | None:
    """Return the value of one side of an equation; None if it has no value.

    Raises:
        ArithmeticError: The side divides by zero, or a value is too large.
    """
    values: list[Fraction] = []
    operators: list[str] = []
    # Whether each value is a percentage. In a product 20% is 0.2; elsewhere it is 20.
    shares: list[bool] = []
    value_next = True
    for count, token in enumerate(_TOKEN.finditer(side)):
        text = _SAME.get(token[0], token[0])
        if count > _MAX_TOKENS or token["name"]:
            return None
        sign = _operator(text, is_number=bool(token["number"]), after_value=not value_next)
        if sign:
            # A power binds to the right.
            if not _reduce(values, shares, operators, _OPERATIONS[sign][0] + (sign == "^")):
                return None
            operators.append(sign)
            value_next = True
        if token["number"]:
            match = _NUMBER.fullmatch(text)
            value = _value(match) if match else None
            if value is None or not value_next:
                return None
            values.append(value)
            shares.append(False)
            value_next = False
        elif text == "(":
            operators.append(text)
        elif text == ")":
            if not _reduce(values, shares, operators, 0):
                return None
            if operators:
                operators.pop()
        elif text == "%" and shares:
            shares[-1] = True
    operators = [sign for sign in operators if sign != "("]
    if not _reduce(values, shares, operators, 0) or len(values) != 1:
        return None
    return values[0]


def _operator(text: str, *, is_number: bool, after_value: bool) -> str:
    """Return the operator that a token writes or implies; empty for none.

    Args:
        text: The token.
        is_number: Whether the token is a number, maybe with a sign.
        after_value: Whether the token before ends a value.
    """
    if after_value and is_number and text[0] in "-\u2212":
        return "+"  # 16 -3
    if after_value and text == "(":
        return "*"  # 2(3 + 4)
    if text[-1] in "+-*/^":
        return text
    return "*" if "of" in text else ""


def _reduce(values: list[Fraction], shares: list[bool], operators: list[str], binding: int) -> bool:
    """Apply the operators that bind at least as strongly as `binding`.

    Args:
        values: Operands so far; results replace their operands in place.
        shares: Whether each operand is a percentage.
        operators: Operators and opening brackets that are not applied yet.
        binding: The lowest strength of an operator to apply.

    Returns:
        False if an operand is missing.
    """
    while operators and operators[-1] != "(" and _OPERATIONS[operators[-1]][0] >= binding:
        sign = operators.pop()
        if len(values) < 2:
            return False
        (b, b_share), (a, a_share) = ((values.pop(), shares.pop()) for _ in range(2))
        if sign == "*":
            a, b = a / 100 if a_share else a, b / 100 if b_share else b
        value = _OPERATIONS[sign][1](a, b)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise OverflowError
        values.append(value)
        shares.append(sign in "+-" and a_share and b_share)
    return True


def _power(base: Fraction, power: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if power.denominator != 1 or abs(power) * bits > _MAX_BITS:
        raise OverflowError
    return base ** int(power)


_Binary = Callable[[Fraction, Fraction], Fraction]
_OPERATIONS: Final[dict[str, tuple[int, _Binary]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "^": (3, _power),
}
