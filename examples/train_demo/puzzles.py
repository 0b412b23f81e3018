"""Number puzzles: make a target from three or four numbers, each used once; and judging states.

Numbers are 1 to 13, targets 1 to 50, operations + - * / with whole results of 0 or more.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final

from train_demo.held_out import reserved

LARGEST: Final = 13
LARGEST_TARGET: Final = 50

Numbers = tuple[int, ...]
"""What is left to combine, ascending."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Two numbers put together, and what is left then."""

    left: int
    sign: str
    right: int
    result: int
    rest: Numbers

    def __str__(self) -> str:
        equation = f"{self.left} {self.sign} {self.right} = {self.result}"
        return f"{equation} (left: {' '.join(map(str, self.rest))})"


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers, a target, and one way from the first to the second."""

    numbers: Numbers
    target: int
    steps: tuple[Operation, ...]

    @property
    def solution(self) -> str:
        """Its steps, one a line."""
        return "\n".join(map(str, self.steps))


def results(a: int, b: int) -> Iterator[tuple[int, str, int, int]]:
    """Yield (left, sign, right, result) of every allowed operation on two numbers."""
    small, large = sorted((a, b))
    yield a, "+", b, a + b
    yield large, "-", small, large - small
    yield a, "*", b, a * b
    for left, right in {(a, b), (b, a)}:
        if right and left % right == 0:
            yield left, "/", right, left // right


def operations(numbers: Numbers) -> list[Operation]:
    """Return every allowed operation on two of the numbers."""
    return [
        Operation(left, sign, right, result, _without(numbers, i, j, result))
        for i, j in combinations(range(len(numbers)), 2)
        for left, sign, right, result in results(numbers[i], numbers[j])
    ]


def _without(numbers: Numbers, i: int, j: int, result: int) -> Numbers:
    remaining = [number for k, number in enumerate(numbers) if k not in (i, j)]
    return tuple(sorted([*remaining, result]))


@lru_cache(maxsize=400_000)
def reachable(numbers: Numbers) -> frozenset[int]:
    """Return the targets that the numbers can be made into."""
    if len(numbers) == 1:
        return frozenset(number for number in numbers if 1 <= number <= LARGEST_TARGET)
    totals: set[int] = set()
    for i, j in combinations(range(len(numbers)), 2):
        for *_, result in results(numbers[i], numbers[j]):
            totals |= reachable(_without(numbers, i, j, result))
    return frozenset(totals)


def judge(numbers: Numbers, target: int) -> str:
    """Return sure, likely or impossible."""
    if target not in reachable(numbers):
        return "impossible"
    return "sure" if len(numbers) <= 2 else "likely"


def key(numbers: Numbers, target: int) -> str:
    """Return what makes a puzzle this puzzle."""
    return f"{' '.join(map(str, numbers))} to {target}"


def _numbers(draw: random.Random, count: int) -> Numbers:
    return tuple(sorted(draw.randint(1, LARGEST) for _ in range(count)))


def puzzle(draw: random.Random, count: int, *, evaluation: bool = False) -> Puzzle:
    """Draw a puzzle with a random solution: of those to train on, or of the reserved.

    Its target is what random operations happened to end in, so each step of the solution is as
    good as any other that leads there.
    """
    while True:
        numbers = remaining = _numbers(draw, count)
        steps: list[Operation] = []
        while len(remaining) > 1:
            i, j = sorted(draw.sample(range(len(remaining)), 2))
            left, sign, right, result = draw.choice(list(results(remaining[i], remaining[j])))
            if draw.random() < 0.5 and sign in "+*":
                left, right = right, left
            remaining = _without(remaining, i, j, result)
            steps.append(Operation(left, sign, right, result, remaining))
        if (
            1 <= remaining[0] <= LARGEST_TARGET
            and reserved(key(numbers, remaining[0])) == evaluation
        ):
            return Puzzle(numbers, remaining[0], tuple(steps))


def state(draw: random.Random) -> tuple[Numbers, int, str]:
    """Draw numbers, a target and the judgement: states as they come up on the way, to train on.

    Of each length half can reach the target. Those that cannot come from puzzles that could.
    """
    count, possible = draw.choices((1, 2, 3, 4), (1, 4, 6, 1))[0], draw.random() < 0.5
    while True:
        numbers = _numbers(draw, max(count, draw.choice((3, 4, 4))))
        if not (goals := reachable(numbers)):
            continue
        goal = draw.choice(sorted(goals))
        while len(numbers) > count:
            choices = operations(numbers)
            if possible:  # stay on a way that leads there
                choices = [choice for choice in choices if goal in reachable(choice.rest)]
            numbers = draw.choice(choices).rest
        if not possible and (count == 4 or draw.random() < 0.2):
            goal = draw.randint(1, LARGEST_TARGET)
        verdict = judge(numbers, goal)
        if (verdict != "impossible") == possible and not reserved(key(numbers, goal)):
            return numbers, goal, verdict
