"""Parses arithmetic expressions in model text without eval: total, exact, and in linear time."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from treegen.tasks.puzzles.countdown_text import read_number
from treegen.tasks.puzzles.puzzle import Number, PuzzleStep, combine

# This also matches numbers longer than any number of a puzzle; `read_number` rejects these.
_TOKEN: Final = re.compile(r"\s*+([0-9]++(?:\.[0-9]++)?+|[-+*/()\u00d7\u00f7\u2212])")
_SIGNS: Final = {"\u00d7": "*", "\u00f7": "/", "\u2212": "-"}
_BINDING: Final = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True, slots=True)
class Expression:
    """Numbers and operators in postfix order."""

    postfix: tuple[Number | str, ...]

    @property
    def numbers(self) -> list[Number]:
        """The numbers, each as often as it occurs."""
        return [item for item in self.postfix if not isinstance(item, str)]

    def value(self) -> Number | None:
        """Return the exact value; None for a division by zero."""
        stack: list[Number] = []
        for item in self.postfix:
            if not isinstance(item, str):
                stack.append(item)
                continue
            b, a = stack.pop(), stack.pop()
            result = combine(a, item, b)
            if result is None:
                return None
            stack.append(result)
        return stack[0]


def parse(text: str) -> Expression | None:
    """Return the expression if the whole text is one, without unary signs; otherwise None."""
    output: list[Number | str] = []
    waiting: list[str] = []
    operand_next, at = True, 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        at, token = match.end(), _SIGNS.get(match[1], match[1])
        if token == "(":
            if not operand_next:
                return None
            waiting.append(token)
        elif token == ")":
            if operand_next:
                return None
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        elif token in _BINDING:
            if operand_next:
                return None
            while waiting and _BINDING.get(waiting[-1], 0) >= _BINDING[token]:
                output.append(waiting.pop())
            waiting.append(token)
            operand_next = True
        else:
            number = read_number(token)
            if not operand_next or number is None:
                return None
            output.append(number)
            operand_next = False
    if operand_next or "(" in waiting:
        return None
    return Expression((*output, *reversed(waiting)))


def value_with(text: str, numbers: Sequence[Number]) -> Number | None:
    """Return the value of a text that is an expression, or an equation of one with its value.

    Returns:
        None unless the text uses each of the numbers exactly once and is true.
    """
    left, equals, right = text.partition("=")
    expression = parse(left)
    # Compare the numbers before computing anything, so that no calculation can be long.
    if expression is None or Counter(expression.numbers) != Counter(numbers):
        return None
    value = expression.value()
    if value is None or (equals and read_number(right.strip().rstrip(".")) != Fraction(value)):
        return None
    return value


def of_steps(steps: Sequence[PuzzleStep]) -> str:
    """Return the expression of a list of steps. Results that later steps use are in brackets."""
    made: list[tuple[Number, str]] = []
    text = ""
    for step in steps:
        sides = [_take(made, number) for number in (step.a, step.b)]
        text = f"{sides[0]} {step.op} {sides[1]}"
        made.append((step.c, f"({text})"))
    return text


def _take(made: list[tuple[Number, str]], number: Number) -> str:
    """Return and remove the text of a number that a step made; without one, return the number."""
    for index, (value, text) in enumerate(made):
        if value == number:
            del made[index]
            return text
    return str(number)
