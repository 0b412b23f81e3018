r"""Make-the-target puzzles: their rules, and their text for few-shot prompts and training.

Two numbers at a time are combined until only the target is left. A state is the sorted tuple of the
numbers that are left. Arithmetic is exact: integers are ints, all others Fractions. Under the
rule `whole`, every result must be a non-negative integer. Without it, as in the Game of 24,
everything except division by zero is allowed.

A puzzle to solve, whose block ends with the model's steps, and a state to judge:

    Input: 4 6 10 13                     Numbers: 4 9
    Target: 24                           Target: 24
    Steps:                               Judge: impossible
    13 - 4 = 9 (left: 6 9 10)
    10 - 6 = 4 (left: 4 9)
    ...

Numbers are in ascending order. A prompt is a header line and solved blocks, each followed by a
blank line, and then the block of the puzzle up to "Steps:\n" or "Judge:". A puzzle is solved when
the target alone is left.
"""

import operator
import re
from collections.abc import Iterable, Sequence
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
        whole: Whether the result must be a non-negative integer.
    """
    remaining = _without(state, step.a, step.b)
    if remaining is None or step.c != combine(step.a, step.op, step.b):
        return False
    return is_allowed(step.c, whole=whole) and state_of((*remaining, step.c)) == step.left


def moves(state: PuzzleState, *, whole: bool) -> list[PuzzleStep]:
    """Return every legal step, each sum and product once, always in the same order."""
    steps: dict[PuzzleStep, None] = {}
    for i, j in combinations(range(len(state)), 2):
        remaining = [number for k, number in enumerate(state) if k not in (i, j)]
        small, large = state[i], state[j]
        choices = [(large, op, small) for op in "+-*/"] + [(small, op, large) for op in "-/"]
        for a, op, b in choices:
            c = combine(a, op, b)
            if c is not None and is_allowed(c, whole=whole):
                steps[PuzzleStep(a, op, b, c, state_of((*remaining, c)))] = None
    return list(steps)


@lru_cache(maxsize=1 << 18)
def reachable(state: PuzzleState, target: Number, whole: bool) -> bool:
    """Return whether steps lead from a state to the target alone.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a non-negative integer.
    """
    if len(state) == 1:
        return state[0] == target
    return any(reachable(next_state, target, whole) for next_state in _next_states(state, whole))


@lru_cache(maxsize=1 << 16)
def _next_states(state: PuzzleState, whole: bool) -> tuple[PuzzleState, ...]:
    return tuple(dict.fromkeys(step.left for step in moves(state, whole=whole)))


def _without(state: PuzzleState, a: Number, b: Number) -> PuzzleState | None:
    remaining = list(state)
    for number in (a, b):
        if number not in remaining:
            return None
        remaining.remove(number)
    return tuple(remaining)


def _plain(number: Number) -> Number:
    return number.numerator if number.denominator == 1 else number


SOLVE_HEADER: Final = "Combine the numbers to reach the target. Use each number once."
VALUE_HEADER: Final = "Can the numbers reach the target?"

# Repeats are bounded, so texts are read only once, and no number is too long for int().
_NUMBER: Final = r"-?[0-9]{1,9}(?:/[0-9]{1,9}|\.[0-9]{1,9})?"
_STEP: Final = re.compile(
    rf"({_NUMBER}) ([-+*/]) ({_NUMBER}) = ({_NUMBER}) \(left: ({_NUMBER}(?: {_NUMBER}){{0,15}})\)"
)


def numbers_text(numbers: Sequence[Number]) -> str:
    """Return numbers in ascending order with spaces between them; fractions are written as 8/3."""
    return " ".join(map(str, state_of(numbers)))


def step_line(step: PuzzleStep) -> str:
    """Return the line of a step, without the newline."""
    return f"{step.a} {step.op} {step.b} = {step.c} (left: {numbers_text(step.left)})"


def solve_head(numbers: Sequence[Number], target: Number) -> str:
    """Return the block of a puzzle, up to where its steps begin."""
    return f"Input: {numbers_text(numbers)}\nTarget: {target}\nSteps:\n"


def solve_block(numbers: Sequence[Number], target: Number, steps: Iterable[PuzzleStep]) -> str:
    """Return the block of a solved puzzle, without a newline at its end.

    Args:
        numbers: The numbers to combine.
        target: The number to reach.
        steps: Steps of the solution.
    """
    return solve_head(numbers, target) + "\n".join(map(step_line, steps))


def value_head(numbers: Sequence[Number], target: Number) -> str:
    """Return the block of a state to judge, up to the space before the judgement."""
    return f"Numbers: {numbers_text(numbers)}\nTarget: {target}\nJudge:"


def value_block(numbers: Sequence[Number], target: Number, judgement: str) -> str:
    """Return the block of a judged state, without a newline at its end.

    Args:
        numbers: The numbers that are left.
        target: The number to reach.
        judgement: "sure", "likely" or "impossible".
    """
    return f"{value_head(numbers, target)} {judgement}"


def prompt(header: str, blocks: Iterable[str], head: str = "") -> str:
    """Return a few-shot prompt: header, solved blocks, and the beginning of the block to complete.

    Args:
        header: First line of the prompt.
        blocks: Solved blocks.
        head: Beginning of the block to complete; by default there is none.
    """
    return "".join(f"{block}\n\n" for block in (header, *blocks)) + head


def value_label(numbers: Sequence[Number], target: Number, *, whole: bool = True) -> str:
    """Return the right judgement of a state.

    A state that cannot reach the target is "impossible". Otherwise a state of one or two numbers is
    "sure", and a state of more numbers is "likely".

    Args:
        numbers: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a non-negative integer.
    """
    if not reachable(state_of(numbers), target, whole):
        return "impossible"
    return "sure" if len(numbers) <= 2 else "likely"


def read_step(line: str) -> PuzzleStep | None:
    """Return the step on a line, right or wrong; None if the line is not a step."""
    match = _STEP.fullmatch(line.rstrip())
    if match is None:
        return None
    words = (match[1], match[3], match[4], *match[5].split(" "))
    numbers = [number for word in words if (number := read_number(word)) is not None]
    if len(numbers) < len(words):
        return None
    a, b, c, *remaining = numbers
    return PuzzleStep(a, match[2], b, c, state_of(remaining))


def read_number(text: str) -> Number | None:
    """Return the number in a text: whole, a fraction such as 8/3, or an exact decimal.

    Returns:
        None if the text is not a number.
    """
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    if not re.fullmatch(_NUMBER, text):
        return None
    top, slash, bottom = text.partition("/")
    if slash and not int(bottom):
        return None
    number = Fraction(top) / int(bottom) if slash else Fraction(top)
    return number.numerator if number.denominator == 1 else number


def apply_steps(numbers: Sequence[Number], text: str, *, whole: bool = True) -> PuzzleState | None:
    """Return the numbers that are left after the steps of a text; None if a step is not legal.

    Args:
        numbers: The numbers at the start.
        text: Steps, one per line. A blank line ends the steps.
        whole: Whether every result must be a non-negative integer.
    """
    state = state_of(numbers)
    for line in text.split("\n"):
        if not line.strip():
            break
        step = read_step(line)
        if step is None or not is_legal(state, step, whole=whole):
            return None
        state = step.left
    return state
