"""A position in a text that may still grow, from which a tool call is read."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[\w.:/-]+")
# No literal and no escape of JSON is longer. An error further from the end remains an error however
# the text continues, unless a string is not closed.
_LONGEST: Final = 16


class NeedMoreText(Exception):
    """The text received so far is too short to decide."""


class NotACall(Exception):
    """The text is not a tool call."""


def _no_constant(name: str) -> NoReturn:
    raise NotACall(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise NotACall(f"{text:.40} is not a finite number")
    return value


# Not strict, because models write unescaped line breaks into strings.
JSON: Final = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)
"""Reads JSON of models. Numbers that JSON cannot write again raise NotACall."""


class Scan:
    """A position in a text.

    Each method starts at the position. It raises NeedMoreText if further text decides, and NotACall
    if the text is not a call.

    Attributes:
        text: The text so far.
        at: The position.
        ended: Whether the text is complete.
    """

    __slots__ = ("at", "ended", "text")

    def __init__(self, text: str, at: int, *, ended: bool) -> None:
        self.text, self.at, self.ended = text, at, ended

    def space(self) -> None:
        """Skip space."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def is_over(self) -> bool:
        """Whether nothing follows."""
        if self.at < len(self.text):
            return False
        if not self.ended:
            raise NeedMoreText
        return True

    def has(self, *literals: str) -> bool:
        """Whether one of some literals follows; the position does not move."""
        if self.text.startswith(literals, self.at):
            return True
        upcoming = self.text[self.at : self.at + max(map(len, literals))]
        if not self.ended and any(literal.startswith(upcoming) for literal in literals):
            raise NeedMoreText
        return False

    def skip(self, literal: str) -> bool:
        """Skip a literal if it follows, and return whether it does."""
        is_next = self.has(literal)
        self.at += len(literal) * is_next
        return is_next

    def take(self, literal: str) -> None:
        """Skip a literal, which must follow."""
        if not self.skip(literal):
            raise NotACall(f"{literal!r} is missing")

    def close(self, literal: str) -> None:
        """Skip space and a literal. A complete text may end before or within the literal."""
        self.space()
        if self.ended and literal.startswith(self.text[self.at :]):
            self.at = len(self.text)
        else:
            self.take(literal)

    def until(self, *literals: str) -> str:
        """Return the text up to the first of some literals, and move to that literal."""
        positions = [at for literal in literals if (at := self.text.find(literal, self.at)) >= 0]
        if not positions:
            raise NotACall(f"{literals} is missing") if self.ended else NeedMoreText
        start, self.at = self.at, min(positions)
        return self.text[start : self.at]

    def until_any(self, *literals: str) -> str:
        """Return the result of `until`, or the rest of a complete text without the literals."""
        try:
            return self.until(*literals)
        except NotACall:
            start, self.at = self.at, len(self.text)
            return self.text[start:]

    def name(self) -> str:
        """Skip a name, and return it."""
        match = _NAME.match(self.text, self.at)
        if (match.end() if match else self.at) == len(self.text) and not self.ended:
            raise NeedMoreText
        if match is None:
            raise NotACall("a name is missing")
        self.at = match.end()
        return match[0]

    def json(self) -> Any:
        """Skip space and a JSON object or array, and return the value."""
        self.space()
        if self.is_over() or self.text[self.at] not in "{[":
            raise NotACall("no JSON")
        try:
            value, self.at = JSON.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            open_string = error.msg.startswith("Unterminated")
            if not self.ended and (open_string or error.pos > len(self.text) - _LONGEST):
                raise NeedMoreText from None
            raise NotACall(str(error)) from None
        except (RecursionError, ValueError) as error:  # too deep, or a number too long
            raise NotACall(str(error)) from None
        return value
