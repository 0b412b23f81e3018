"""Whether a grammar matches any finite text; sampling from one that does not would never end.

A rule terminates if all rules that one of its alternatives needs terminate. Alternatives are
collected first, and then followed from the rules that need no other rule, so the cost is linear in
the text of the grammar, whatever its nesting and repetition.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Final

_MAX_DIGITS: Final = 18  # of an index; int() rejects texts with thousands of digits

_Alternatives = list[tuple[Hashable, list[Hashable]]]
"""Pairs of a rule and what one of its alternatives needs. A rule may have several alternatives."""


def _can_end(alternatives: _Alternatives, start: Hashable) -> bool:
    num_missing = [len(set(needed)) for _, needed in alternatives]
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    for index, (_, needed) in enumerate(alternatives):
        for rule in set(needed):
            waiting[rule].append(index)
    ending: set[Hashable] = set()
    ready = [rule for (rule, _), num in zip(alternatives, num_missing, strict=True) if not num]
    while ready:
        rule = ready.pop()
        if rule in ending:
            continue
        ending.add(rule)
        for index in waiting[rule]:
            num_missing[index] -= 1
            if not num_missing[index]:
                ready.append(alternatives[index][0])
    return start in ending


def has_finite_value(schema: Any) -> bool:
    """Whether some finite JSON value satisfies a schema's requirements and internal references."""
    alternatives: _Alternatives = []
    seen: dict[int, Any] = {}  # by id(); keeps the objects, because freed ids are reused
    stack = [schema]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        needed: list[Hashable] = []
        for options in _requires(part, schema):
            if len(options) == 1:
                needed += map(id, options[0])
            else:
                one_of = (id(part), len(alternatives))
                needed.append(one_of)
                alternatives += [
                    (one_of, [id(subschema) for subschema in alternative])
                    for alternative in options
                ]
            stack += [subschema for alternative in options for subschema in alternative]
        alternatives.append((id(part), needed))
    return _can_end(alternatives, id(schema))


def _requires(schema: Any, root: Any) -> Iterator[list[list[Any]]]:
    """Yield a schema's requirements, each as alternatives: lists of schemas that they need."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return
    if isinstance(name := schema.get("$ref"), str):
        yield [[ref] for ref in [resolve_reference(name, root)] if ref is not None] or [[]]
    for key in ("anyOf", "oneOf"):
        if options := _list(schema.get(key)):
            yield [[alternative] for alternative in options]
    yield [_list(schema.get("allOf"))]
    kinds = schema.get("type", "string")
    yield [_of_kind(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def _of_kind(kind: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the parts that a value of a type must have."""
    if kind == "object":
        properties, other = schema.get("properties"), schema.get("additionalProperties", True)
        properties = properties if isinstance(properties, dict) else {}
        names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        return [properties.get(name, other) for name in names]
    if kind == "array":
        min_items, first = schema.get("minItems", 0), _list(schema.get("prefixItems"))
        is_number = isinstance(min_items, int) or (
            isinstance(min_items, float) and math.isfinite(min_items)
        )
        min_items = int(min_items) if is_number else 0
        item_schemas = [schema.get("items", True)] if min_items > len(first) else []
        return [*first[: max(min_items, 0)], *item_schemas]
    return []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def resolve_reference(name: str, root: Any) -> Any:
    """Return the target of a reference within the schema; None for other references."""
    if not name.startswith("#"):
        return None
    target = root
    for part in filter(None, name[1:].split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            is_index = part.isdecimal() and len(part) <= _MAX_DIGITS and int(part) < len(target)
            target = target[int(part)] if is_index else None
        else:
            target = target.get(part) if isinstance(target, Mapping) else None
    return target


_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)|(?P<text>"(?:\\.|[^"\\])*(?:"i?|\Z)"""
    r"""|/(?:\\.|[^/\\\n])+(?:/[a-z]*)?|<[^<>\s]*>)|(?P<name>[A-Za-z_!?][\w]*)|(?P<mark>\.\.|.)""",
    re.DOTALL,
)


def has_finite_text(text: str) -> bool:
    """Whether the rule `start` of a grammar in Lark's form has any finite text.

    Syntax that is not understood counts as terminating.
    """
    rules = dict(_rules(text))
    alternatives: _Alternatives = []
    for name, words in rules.items():
        _RuleParser(name, words, rules, alternatives).read()
    return "start" not in rules or _can_end(alternatives, "start")


def _rules(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rules: the name and the words of the body of each."""
    lines: list[list[str]] = []
    for line in text.splitlines():
        if lines and (line[:1].isspace() or line.lstrip().startswith("|")):
            lines[-1].append(line)
        else:
            lines.append([line])
    for joined in lines:
        words = [m[0] for m in _TOKEN.finditer("\n".join(joined)) if m.lastgroup != "space"]
        if not words or words[0] == "%":
            continue
        name = words.pop(0).lstrip("!?")
        if words[:1] == ["["]:  # attributes, such as [capture]
            words = words[words.index("]") + 1 :] if "]" in words else words
        if "." in words[:1]:  # a priority
            words = words[2:]
        if words[:1] == [":"]:
            yield name, words[1:]


class _RuleParser:
    """Parses a rule's body: alternatives of sequences of parts. Each group becomes a rule too."""

    def __init__(
        self, name: str, words: list[str], rules: Mapping[str, Any], alternatives: _Alternatives
    ) -> None:
        self._words, self._rules, self._alternatives, self._at = words, rules, alternatives, 0
        # Open groups: each with what its current sequence needs, and its closing bracket.
        self._open: list[tuple[Hashable, list[Hashable], str]] = [(name, [], "")]

    def read(self) -> None:
        """Add the alternatives of the rule and its groups."""
        while self._at < len(self._words):
            word = self._take()
            if word in ("(", "["):
                closing = ")" if word == "(" else "]"
                self._open.append(((len(self._alternatives), len(self._open)), [], closing))
                if word == "[":
                    self._alternatives.append((self._open[-1][0], []))
            elif word == "|":
                self._end_alternative()
            elif word == self._open[-1][2]:
                self._end_alternative()
                self._part([self._open.pop()[0]])
            elif word == "%":  # an inline schema or regular expression
                self._skip()
                self._part([])
            else:
                self._part([word] if word in self._rules else [])
        while self._open:
            self._end_alternative()
            self._open.pop()

    def _take(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _end_alternative(self) -> None:
        rule, needed, closing = self._open[-1]
        self._alternatives.append((rule, needed))
        self._open[-1] = rule, [], closing

    def _part(self, needed: Iterable[Hashable]) -> None:
        """Add a part to the sequence, unless the operator after it makes it optional."""
        min_is_zero = False
        if self._peek() in ("?", "*"):
            self._take()
            min_is_zero = True
        elif self._peek() == "+":
            self._take()
        elif self._peek() in ("~", "{"):
            min_is_zero = self._repeats_none()
        if not min_is_zero:
            self._open[-1][1].extend(needed)

    def _repeats_none(self) -> bool:
        """Whether a repeat count such as ~0..3 or {0,3} allows zero."""
        opened = self._take() == "{"
        first = self._take() if self._peek() else ""
        if opened:
            while self._peek() not in ("", "}"):
                self._take()
            self._at += 1
        elif self._peek() == "..":
            self._at += 2
        return first == "0"

    def _skip(self) -> None:
        depth = 0
        while self._peek():
            depth += {"{": 1, "}": -1}.get(self._take(), 0)
            if depth == 0 and self._words[self._at - 1] == "}":
                break
