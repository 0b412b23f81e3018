"""The arguments of an instruction, checked once before any answer is checked."""

from collections.abc import Callable, Mapping
from typing import Any

from treegen.tasks.common.jsonl import text_field

Check = Callable[[str], bool]
"""Returns whether an answer follows an instruction, in time linear in the answer."""


def number(given: Mapping[str, Any], name: str) -> int:
    """Return a whole number from 0; raise ValueError if it is missing or invalid."""
    value = given.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number from 0")
    return value


def text(given: Mapping[str, Any], name: str) -> str:
    """Return a text; raise ValueError if it is missing or invalid."""
    return text_field(dict(given), name)


def texts(given: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of texts; raise ValueError if it is missing or invalid."""
    found = given.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{name} is not a list of texts")
    return [text_field({name: each}, name) for each in found]


def relation(given: Mapping[str, Any], name: str, bound: int) -> Callable[[int], bool]:
    """Return the test of a count against a bound.

    Args:
        given: Arguments of the instruction.
        name: Name of the argument with the relation: "less than" or "at least".
        bound: The bound.

    Raises:
        ValueError: The relation is unknown.
    """
    word = given.get(name)
    if word == "less than":
        return lambda count: count < bound
    if word == "at least":
        return lambda count: count >= bound
    raise ValueError(f"{name} is {word!r:.40}, neither 'less than' nor 'at least'")
