"""Make-the-target puzzles: two numbers at a time are combined until only the target is left.

A state is the sorted tuple of the numbers that are left. Arithmetic is exact: whole numbers are
ints, all others Fractions. Under the rule `whole`, every result must be a whole number from 0 on.
Without it, as in the Game of 24, everything except division by zero is allowed.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Final

Number = int | Fraction
PuzzleState = tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class PuzzleStep:
    """The step `a op b = c`, and all numbers that are left after it, sorted."""

    a: Number
    op: str
    b: Number
    c: Number
    left: PuzzleState


_OPERATIONS: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def state_of(numbers: Sequence[Number]) -> PuzzleState:
    """Return the state with these numbers left."""
    return tuple(sorted(numbers))


def combine(a: Number, op: str, b: Number) -> Number | None:
    """Return the exact result of an operation; None for a division by zero.

    Args:
        a: Left operand.
        op: Operator: one of + - * /.
        b: Right operand.
    """
    if op == "/":
        return _plain(Fraction(a) / b) if b else None
    return _plain(_OPERATIONS[op](a, b))


def is_allowed(number: Number, *, whole: bool) -> bool:
    """Return whether the rules allow a result."""
    return not whole or (isinstance(number, int) and number >= 0)


def is_legal(state: PuzzleState, step: PuzzleStep, *, whole: bool) -> bool:
    """Return whether a step is right arithmetic, follows the rules, and leaves the stated numbers.

    Args:
        state: The numbers that are left before the step.
        step: The step.
        whole: Whether the result must be a whole number from 0 on.
    """
    left = _without(state, step.a, step.b)
    if left is None or step.c != combine(step.a, step.op, step.b):
        return False
    return is_allowed(step.c, whole=whole) and state_of((*left, step.c)) == step.left


def moves(state: PuzzleState, *, whole: bool) -> list[PuzzleStep]:
    """Return every legal step, each sum and product once, always in the same order."""
    steps: dict[PuzzleStep, None] = {}
    for i, j in combinations(range(len(state)), 2):
        rest = [number for k, number in enumerate(state) if k not in (i, j)]
        small, large = state[i], state[j]
        choices = [(large, op, small) for op in "+-*/"] + [(small, op, large) for op in "-/"]
        for a, op, b in choices:
            c = combine(a, op, b)
            if c is not None and is_allowed(c, whole=whole):
                steps[PuzzleStep(a, op, b, c, state_of((*rest, c)))] = None
    return list(steps)


@lru_cache(maxsize=1 << 18)
def reachable(state: PuzzleState, target: Number, whole: bool) -> bool:
    """Return whether steps lead from a state to the target alone.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a whole number from 0 on.
    """
    if len(state) == 1:
        return state[0] == target
    return any(reachable(left, target, whole) for left in _next_states(state, whole))


@lru_cache(maxsize=1 << 16)
def _next_states(state: PuzzleState, whole: bool) -> tuple[PuzzleState, ...]:
    return tuple(dict.fromkeys(step.left for step in moves(state, whole=whole)))


def _without(state: PuzzleState, a: Number, b: Number) -> PuzzleState | None:
    rest = list(state)
    for number in (a, b):
        if number not in rest:
            return None
        rest.remove(number)
    return tuple(rest)


def _plain(number: Number) -> Number:
    return number.numerator if number.denominator == 1 else number
