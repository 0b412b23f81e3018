"""A place in a text that may still grow, from which a tool call is read."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[\w.:/-]+")
# No literal and no escape of JSON is longer. A fault further from the end is one however the text
# goes on, unless a string is not closed.
_LONGEST: Final = 16


class NeedMoreText(Exception):
    """What follows decides, and the text has not got that far."""


class NotACall(Exception):
    """This is no call."""


def _no_constant(name: str) -> NoReturn:
    raise NotACall(f"{name} is no JSON")


# Models write line breaks into strings as they are.
_JSON: Final = json.JSONDecoder(strict=False, parse_constant=_no_constant)


class Scan:
    """A place in a text.

    text, at: the text so far, and the place. ended: whether the text is whole. Each method goes on
    from the place, and raises More if further text decides, NotACall if this is no call.
    """

    __slots__ = ("at", "ended", "text")

    def __init__(self, text: str, at: int, *, ended: bool) -> None:
        self.text, self.at, self.ended = text, at, ended

    def space(self) -> None:
        """Pass space."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def is_over(self) -> bool:
        """Whether nothing follows."""
        if self.at < len(self.text):
            return False
        if not self.ended:
            raise NeedMoreText
        return True

    def has(self, *literals: str) -> bool:
        """Whether one of some literals follows; the place stays."""
        if self.text.startswith(literals, self.at):
            return True
        rest = self.text[self.at : self.at + max(map(len, literals))]
        if not self.ended and any(literal.startswith(rest) for literal in literals):
            raise NeedMoreText
        return False

    def skip(self, literal: str) -> bool:
        """Pass a literal if it follows; returns whether it does."""
        found = self.has(literal)
        self.at += len(literal) * found
        return found

    def take(self, literal: str) -> None:
        """Pass a literal, which must follow."""
        if not self.skip(literal):
            raise NotACall(f"{literal!r} is missing")

    def close(self, literal: str) -> None:
        """Pass space and a literal. A text that has ended may lack the literal or its end."""
        self.space()
        if self.ended and literal.startswith(self.text[self.at :]):
            self.at = len(self.text)
        else:
            self.take(literal)

    def until(self, *literals: str) -> str:
        """Pass text up to the first of some literals, which stays, and return it."""
        places = [place for each in literals if (place := self.text.find(each, self.at)) >= 0]
        if not places:
            raise NotACall(f"{literals} is missing") if self.ended else NeedMoreText
        start, self.at = self.at, min(places)
        return self.text[start : self.at]

    def until_any(self, *literals: str) -> str:
        """As `until`, or the rest of a text that has ended."""
        try:
            return self.until(*literals)
        except NotACall:
            start, self.at = self.at, len(self.text)
            return self.text[start:]

    def name(self) -> str:
        """Pass a name, and return it."""
        found = _NAME.match(self.text, self.at)
        if (found.end() if found else self.at) == len(self.text) and not self.ended:
            raise NeedMoreText
        if found is None:
            raise NotACall("a name is missing")
        self.at = found.end()
        return found[0]

    def json(self) -> Any:
        """Pass space and a JSON object or array, and return it."""
        self.space()
        if self.is_over() or self.text[self.at] not in "{[":
            raise NotACall("no JSON")
        try:
            found, self.at = _JSON.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            open_string = error.msg.startswith("Unterminated")
            if not self.ended and (open_string or error.pos > len(self.text) - _LONGEST):
                raise NeedMoreText from None
            raise NotACall(str(error)) from None
        except (RecursionError, ValueError) as error:  # too deep, or a number too long
            raise NotACall(str(error)) from None
        return found
