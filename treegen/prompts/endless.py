"""Whether a grammar has any finite text: one that has none would be sampled for ever.

A thing can end if some way through it does not meet itself again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

_ANY: Final = ("string", "number", "integer", "boolean", "null")


def schema_ends(schema: Any) -> bool:
    """Whether some JSON value satisfies what a schema requires, as far as references go."""
    return _ends(schema, schema, frozenset())


def _ends(schema: Any, root: Any, within: frozenset[str]) -> bool:
    """within: the references that lead here."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if isinstance(name := schema.get("$ref"), str):
        if name in within:
            return False
        found = _resolved(name, root)
        if found is not None and not _ends(found, root, within | {name}):
            return False
    for key in ("anyOf", "oneOf"):
        ways = schema.get(key)
        if isinstance(ways, list) and ways and not any(_ends(w, root, within) for w in ways):
            return False
    both = schema.get("allOf")
    if isinstance(both, list) and not all(_ends(each, root, within) for each in both):
        return False
    kinds = schema.get("type", "string")
    return any(
        _kind_ends(kind, schema, root, within)
        for kind in (kinds if isinstance(kinds, list) else [kinds])
    )


def _kind_ends(kind: Any, schema: dict[str, Any], root: Any, within: frozenset[str]) -> bool:
    if kind == "object":
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(
            _ends(known.get(name, other), root, within) for name in schema.get("required", ())
        )
    if kind == "array":
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return all(_ends(each, root, within) for each in needed)
    return True


def _resolved(name: str, root: Any) -> Any:
    """What a reference within the schema is to; None for others."""
    if not name.startswith("#"):
        return None
    found = root
    for part in filter(None, name[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found


_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)|(?P<text>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*"""
    r"""|<[^<>\s]*>)|(?P<name>[A-Za-z_!?][\w]*)|(?P<mark>\.\.|.)""",
    re.DOTALL,
)


def lark_ends(text: str) -> bool:
    """Whether the rule `start` of a grammar in Lark's form has any finite text.

    What is not understood counts as something that ends.
    """
    rules = dict(_rules(text))
    ending: set[str] = set()
    while True:
        more = {name for name, body in rules.items() if _Body(body, rules, ending).ends()} - ending
        if not more:
            return "start" not in rules or "start" in ending
        ending |= more


def _rules(text: str) -> Iterator[tuple[str, list[str]]]:
    """The rules, by name: the words of each one's body."""
    lines: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() or line.lstrip().startswith("|"):
            lines[-1:] = [f"{lines[-1]}\n{line}"] if lines else [line]
        else:
            lines.append(line)
    for line in lines:
        words = [m[0] for m in _TOKEN.finditer(line) if m.lastgroup != "space"]
        if not words or words[0] == "%":
            continue
        name = words.pop(0).lstrip("!?")
        if words[:1] == ["["]:  # attributes, such as [capture]
            words = words[words.index("]") + 1 :] if "]" in words else words
        if "." in words[:1]:  # a priority
            words = words[2:]
        if words[:1] == [":"]:
            yield name, words[1:]


class _Body:
    """Reads the body of a rule: alternatives of sequences of parts."""

    def __init__(self, words: list[str], rules: dict[str, list[str]], ending: set[str]) -> None:
        self._words, self._rules, self._ending, self._at = words, rules, ending, 0

    def ends(self) -> bool:
        return self._alternatives()

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def _alternatives(self) -> bool:
        found = self._sequence()
        while self._peek() == "|":
            self._take()
            found |= self._sequence()
        return found

    def _sequence(self) -> bool:
        found = True
        while self._peek() not in ("", "|", ")", "]"):
            part = self._part()
            least_is_none = False
            if self._peek() in ("?", "*"):
                self._take()
                least_is_none = True
            elif self._peek() == "+":
                self._take()
            elif self._peek() == "~" or self._peek() == "{":
                least_is_none = self._repeats_none()
            found &= part or least_is_none
        return found

    def _repeats_none(self) -> bool:
        """Whether a count such as ~0..3 or {0,3} allows none."""
        opened = self._take() == "{"
        first = self._take() if self._peek() else ""
        if opened:
            while self._peek() not in ("", "}"):
                self._take()
            self._at += 1
        elif self._peek() == "..":
            self._at += 2
        return first == "0"

    def _part(self) -> bool:
        word = self._take()
        if word in ("(", "["):
            found = self._alternatives()
            self._at += 1
            return found or word == "["
        if word == "%":  # a schema or a regular expression of its own
            depth = 0
            while self._peek():
                depth += {"{": 1, "}": -1}.get(self._take(), 0)
                if depth == 0 and self._words[self._at - 1] == "}":
                    break
            return True
        return word not in self._rules or word in self._ending
