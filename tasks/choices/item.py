"""One question with its choices, as all tasks of this package use it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.tasks.common.jsonl import text_field


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, the texts to choose from, and the index of the right one.

    id: its id in the data; empty if it has none.
    prompt: the text before the choices; empty if each choice has its own.
    choices: the texts to choose from, as in the data.
    gold: the index of the right choice, from 0.
    rest: a text that follows every choice. If there is one, it is scored after each choice.
    Otherwise the choices are scored after the prompt.
    metadata: fields that reports may show.
    """

    id: str
    prompt: str
    choices: tuple[str, ...]
    gold: int
    rest: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def problem(self, id: str) -> Problem:
        """Return the item as a problem. lm-eval puts one space before each scored text."""
        metadata = dict(self.metadata)
        if self.rest is None:
            scored = tuple(f" {choice}" for choice in self.choices)
            return Problem(id, self.prompt, scored[self.gold], metadata, scored)
        scored = (f" {self.rest}",) * len(self.choices)
        right = f"{self.choices[self.gold]}{scored[0]}"
        return Problem(id, self.prompt, right, metadata, scored, openings=self.choices)

    @property
    def turn(self) -> Turn:
        """The item as a solved example: the prompt, and the answer after it."""
        right = self.choices[self.gold]
        if self.rest is None:
            return self.prompt, right
        return f"{self.prompt}{right}", self.rest


def id_of(row: Mapping[str, Any], field: str) -> str:
    """Return the id in a field of a row as text, also if it is 0; empty if there is none."""
    found = row.get(field)
    return "" if found is None else str(found)


def check(item: ChoiceItem) -> ChoiceItem:
    """Return an item that has been checked.

    Raises:
        ValueError: The right choice is not among the choices, or two choices are equal.
    """
    if len(item.choices) < 2:
        raise ValueError("it needs two choices or more")
    if len(set(item.choices)) < len(item.choices):
        raise ValueError("two of its choices are equal; change or remove one")
    if not 0 <= item.gold < len(item.choices):
        raise ValueError("the right choice must be among its choices")
    return item


def texts_of(values: Any, name: str) -> tuple[str, ...]:
    """Return a list of texts; raise ValueError if it is not a list or a text is invalid."""
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a list")
    return tuple(text_field({name: value}, name) for value in values)


def place(value: Any, name: str) -> int:
    """Return a whole number that may be written as text; raise ValueError for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} is {value!r:.40}, not a whole number: the split may have no answers")
