"""Suggestions for misspelled words and arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from types import MappingProxyType
from typing import Any, Final, TypeVar

from treegen.common.foreign_names import (
    NEUTRAL_SAMPLING,
    SAMPLING_ADVICE,
    advise_foreign,
    describe_value,
    drop_neutral,
)
from treegen.errors import InputError, arg

_Kind = TypeVar("_Kind", bound=type)

_MIN_PART_CHARS: Final = 3  # shorter words are not compared with parts of longer ones


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' for the nearest known words, or ""."""
    near = find_near(word, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def find_near(word: str, known: Iterable[str]) -> list[str]:
    """Return at most two known words that a user may have meant, the nearest first.

    These are words with few typing errors, words that begin or end with `word`, and the start of
    `word`, such as `eval` for `evaluate`. A word that only shares a part with `word` means
    something else, as `max_rows` does for `max_logprobs`.

    Args:
        word: The word that the user typed.
        known: The known words.
    """
    typed = word.lower()
    near: list[tuple[int, str]] = []
    for other in known:
        longest = max(len(typed), len(other))
        max_distance = min(max(longest // 3, longest // 2 and 1), 3)
        if abs(len(typed) - len(other)) <= max_distance:
            distance = _count_typing_errors(typed, other.lower())
            if distance <= max_distance:
                near.append((distance, other))
                continue
        name = other.lower()
        is_part = name.startswith(typed) or name.endswith(typed)
        if name and typed.startswith(name):  # `evaluate` for `eval`, but no further words
            is_part = typed[len(name)] not in "_-"
        if is_part and min(len(typed), len(name)) >= _MIN_PART_CHARS:
            near.append((4, other))
    near.sort(key=lambda pair: pair[0])
    return [other for _, other in near[:2]]


def _count_typing_errors(a: str, b: str) -> int:
    """Return how many characters were added, left out, replaced or swapped with their neighbour."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a):
        above = row
        row = [i + 1]
        for j, other in enumerate(b):
            cost = min(above[j] + (char != other), above[j + 1] + 1, row[j] + 1)
            if i and j and char == b[j - 1] and a[i - 1] == other:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
        before = above
    return row[-1]


def suggest_argument(
    name: str, known: Iterable[str], advice_of: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return "; did you mean NAME=?" for an unknown name, or advice, or "".

    Args:
        name: The unknown name.
        known: The known names.
        advice_of: Advice that only this call has, by name. Default: none.
    """
    known = list(known)
    ours, advice = advise_foreign(name, known)
    advice = advice_of.get(name, advice)
    if advice:
        return f"; {advice}"
    near = [ours] if ours else find_near(name, known)
    if not near:
        return ""
    suggestions = " or ".join(arg(f"{other}=") for other in near)
    return f"; did you mean {suggestions}?{describe_value(name)}"


def suggest_arguments(names: Sequence[str], hint: Callable[[str], str], otherwise: str = "") -> str:
    """Return the hints for unknown names; with several names, each hint follows its names.

    Args:
        names: The unknown names.
        hint: Returns the hint for a name as `suggest_argument` does.
        otherwise: Text to append if a name has no hint. Default: "".
    """
    hints = [hint(name) for name in names]
    if len(names) == 1:
        return hints[0] or otherwise
    names_of: dict[str, list[str]] = {}
    for name, part in zip(names, hints, strict=True):
        if part:
            names_of.setdefault(part, []).append(name)
    text = "".join(
        f"; {' and '.join(group)}: {part.removeprefix('; ')}" for part, group in names_of.items()
    )
    return text if all(hints) else f"{text}{otherwise}"


def with_suggestions(kind: _Kind) -> _Kind:
    """Make a class of sampling parameters reject unknown arguments and assignments with a hint.

    Arguments of vLLM that request what treegen does anyway are accepted.
    """
    init: Callable[..., None] = kind.__init__  # type: ignore[misc]
    fields = frozenset(kind.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(init)
    def init_checked(self: object, *args: Any, **arguments: Any) -> None:
        arguments = drop_neutral(arguments, fields, NEUTRAL_SAMPLING)
        try:
            init(self, *args, **arguments)
        except TypeError:
            check_field_names(kind, arguments)
            raise

    def _reject_change(_: object, name: str, value: object) -> None:
        raise FrozenInstanceError(
            f"{kind.__name__} cannot be changed; use dataclasses.replace(params, {name}=...)"
        )

    kind.__init__ = init_checked  # type: ignore[misc]
    kind.__setattr__ = _reject_change  # type: ignore[assignment]
    return kind


def check_field_names(kind: Any, names: Iterable[object]) -> None:
    """Raise InputError for a name that is no argument of sampling parameters."""
    fields = list(kind.__dataclass_fields__)
    if unknown := [str(name) for name in names if name not in fields]:
        title = kind.__name__
        hints = suggest_arguments(
            unknown,
            lambda name: suggest_argument(name, fields, SAMPLING_ADVICE),
            f"; `help(treegen.{title})` lists all parameters",
        )
        raise InputError(f"{title} has no {' and no '.join(map(repr, unknown))}{hints}")
