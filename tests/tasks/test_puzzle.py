"""Make-the-target puzzles: the solver against brute force, reading steps and expressions."""

import operator
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from puzzle_model import solutions

from treegen.tasks.puzzles.base import puzzle_value_prompt, read_judgement, read_proposals
from treegen.tasks.puzzles.game24 import of_steps, value_with
from treegen.tasks.puzzles.puzzle import (
    SOLVE_HEADER,
    Number,
    PuzzleState,
    PuzzleStep,
    apply_steps,
    is_legal,
    moves,
    prompt,
    reachable,
    read_number,
    read_step,
    solve_block,
    solve_head,
    state_of,
    step_line,
    value_block,
    value_head,
    value_label,
)

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def every_value(numbers: PuzzleState) -> set[Fraction]:
    """All values of all expressions over some numbers, by listing shapes and operators."""

    def values(part: tuple[Fraction, ...]) -> Iterator[Fraction]:
        if len(part) == 1:
            yield part[0]
        for cut in range(1, len(part)):
            for a, b in product(set(values(part[:cut])), set(values(part[cut:]))):
                for sign, apply in OPERATORS.items():
                    if sign != "/" or b:
                        yield apply(a, b)

    return {
        value
        for order in set(permutations(numbers))
        for value in values(tuple(map(Fraction, order)))
    }


def a_puzzle(draw: random.Random) -> tuple[PuzzleState, int]:
    return state_of([draw.randint(0, 13) for _ in range(draw.choice((1, 2, 3, 4)))]), draw.randint(
        0, 50
    )


# The solver


@pytest.mark.parametrize("seed", range(6))
def test_reachable_targets_equal_those_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    numbers = state_of([draw.randint(0, 9) for _ in range(3)])
    values = every_value(numbers)
    for target in range(-5, 60):
        assert reachable(numbers, target, False) == (target in values), (numbers, target)
    assert reachable(numbers, Fraction(1, 7), False) == (Fraction(1, 7) in values)


def test_puzzles_that_need_fractions() -> None:
    assert reachable((3, 3, 8, 8), 24, False)  # 8 / (3 - 8 / 3)
    assert not reachable((3, 3, 8, 8), 24, True)
    assert not reachable((1, 1, 1, 1), 24, False)


@pytest.mark.parametrize("whole", [True, False])
def test_every_solution_is_legal_and_ends_in_the_target(whole: bool) -> None:
    draw = random.Random(7)
    found = 0
    for _ in range(40):
        numbers, target = a_puzzle(draw)
        for steps in list(solutions(numbers, target, whole=whole))[:20]:
            found += 1
            state = numbers
            for step in steps:
                assert is_legal(state, step, whole=whole)
                state = step.left
            assert state == (target,)
            assert apply_steps(numbers, "\n".join(map(step_line, steps)), whole=whole) == (target,)
        assert any(True for _ in solutions(numbers, target, whole=whole)) == reachable(
            numbers, target, whole
        )
    assert found > 50


def test_moves_are_all_legal_steps() -> None:
    steps = moves((2, 3, 3), whole=True)
    assert len(set(steps)) == len(steps)
    assert {(s.a, s.op, s.b) for s in steps} == {
        (3, "+", 2),
        (3, "-", 2),
        (3, "*", 2),
        (3, "+", 3),
        (3, "-", 3),
        (3, "*", 3),
        (3, "/", 3),
    }
    more = {(s.a, s.op, s.b, s.c) for s in moves((2, 3), whole=False)}
    assert {(2, "-", 3, -1), (2, "/", 3, Fraction(2, 3))} <= more
    assert moves((5,), whole=False) == []
    assert [s.c for s in moves((0, 0), whole=False)] == [0, 0, 0]  # and no 0 / 0


@pytest.mark.parametrize(
    "line",
    [
        "4 + 9 = 12 (left: 10 12 13)",  # wrong arithmetic
        "4 + 9 = 13 (left: 10 13)",  # a number is lost
        "4 + 9 = 13 (left: 4 10 13 13)",  # a number is used and kept
        "4 + 4 = 8 (left: 8 10 13)",  # there is one 4
        "4 - 9 = -5 (left: -5 10 13)",  # below 0
        "9 / 4 = 9/4 (left: 9/4 10 13)",  # not whole
        "4 / 0 = 0 (left: 0 9 10)",
        "4 + 9 = 13",
        "4 + 9 = 13 (left: 10 13 13) and so on",
        "four + 9 = 13 (left: 10 13 13)",
        "4 + 9 = 13 (left: 10 13 1/0)",
        "4 + 9 = 13 (left: " + "1 " * 5000 + ")",
        "\u0664 + 9 = 13 (left: 10 13 13)",  # an Arabic 4
    ],
)
def test_illegal_steps(line: str) -> None:
    assert apply_steps((4, 9, 10, 13), line) is None
    assert apply_steps((4, 9, 10, 13), f"10 + 13 = 23 (left: 4 9 23)\n{line}") is None


def test_steps_are_read_in_any_order_of_what_is_left() -> None:
    assert apply_steps((4, 9, 10, 13), "4 + 9 = 13 (left: 13 13 10)  \n") == (10, 13, 13)
    assert apply_steps((4, 9), "") == (4, 9)
    # A blank line ends the steps, whatever comes then.
    assert apply_steps((4, 9), "9 - 4 = 5 (left: 5)\n\nInput: 1 2") == (5,)
    assert apply_steps((3, 8), "8 / 3 = 8/3 (left: 8/3)", whole=False) == (Fraction(8, 3),)
    assert apply_steps((1, 2), "1 / 2 = 0.5 (left: 0.5)", whole=False) == (Fraction(1, 2),)
    assert apply_steps((2, 3), "2 / 3 = 0.67 (left: 0.67)", whole=False) is None  # rounded


def test_judgements_are_exact() -> None:
    assert value_label((4, 6), 24) == "sure"
    assert value_label((4, 9), 24) == "impossible"
    assert value_label((4, 4, 10), 24) == "likely"
    assert value_label((24,), 24) == "sure"
    assert value_label((3, 3, 8, 8), 24) == "impossible"
    assert value_label((3, 3, 8, 8), 24, whole=False) == "likely"


def test_prompts_have_the_documented_format() -> None:
    steps = next(solutions((4, 9, 10, 13), 24, whole=True))
    block = solve_block((13, 4, 10, 9), 24, steps)
    assert block.startswith("Input: 4 9 10 13\nTarget: 24\nSteps:\n") and block.endswith(
        "= 24 (left: 24)"
    )
    whole = prompt(SOLVE_HEADER, [block], solve_head((1, 2, 3), 6))
    assert whole == (
        "Combine the numbers to reach the target. Use each number once.\n\n"
        f"{block}\n\nInput: 1 2 3\nTarget: 6\nSteps:\n"
    )
    assert value_block((9, 4), 24, "impossible") == "Numbers: 4 9\nTarget: 24\nJudge: impossible"
    assert puzzle_value_prompt((4, 9), 24, whole=True).endswith("\n\n" + value_head((4, 9), 24))


@given(st.integers(-(10**8), 10**8), st.integers(1, 10**8))
def test_numbers_survive_writing_and_reading(top: int, bottom: int) -> None:
    number = Fraction(top, bottom)
    plain: Number = number.numerator if number.denominator == 1 else number
    assert read_number(str(plain)) == plain
    assert read_number(f"{top}/0") is None


@given(st.text(max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    for reader in (read_step, read_number):
        reader(text)
    apply_steps((4, 9, 10, 13), text)
    value_with(text, (4, 9))
    assert read_judgement(text) in (0.0, 0.001, 1.0, 20.0)


def test_proposals_are_the_legal_ones_each_once() -> None:
    answer = (
        "9 - 4 = 5 (left: 5 10)\n9 - 4 = 5 (left: 10 5)\n  4 + 9 = 13 (left: 10 13)\n"
        "4 + 10 = 15 (left: 9 15)\nI would say\n\n10 - 9 = 1 (left: 1 4)"
    )
    assert read_proposals(answer, (4, 9, 10), whole=True) == [
        "9 - 4 = 5 (left: 5 10)\n",
        "4 + 9 = 13 (left: 10 13)\n",
        "10 - 9 = 1 (left: 1 4)\n",
    ]


# Expressions


def an_expression(draw: random.Random, depth: int) -> tuple[str, Fraction | None, list[int]]:
    """A random expression, its value (None: divides by zero), and its numbers."""
    if depth == 0 or draw.random() < 0.3:
        number = draw.randint(0, 13)
        return str(number), Fraction(number), [number]
    (left, a, numbers), (right, b, more) = (an_expression(draw, depth - 1) for _ in range(2))
    sign = draw.choice("+-*/")
    value = None if a is None or b is None or (sign == "/" and not b) else OPERATORS[sign](a, b)
    return f"({left}{draw.choice(['', ' '])}{sign} {right})", value, numbers + more


def numbers_in(text: str) -> list[Any]:
    return [read_number(word) for word in re.findall(r"[0-9]+(?:\.[0-9]+)?", text)]


@pytest.mark.parametrize("seed", range(50))
def test_expressions_have_their_exact_value(seed: int) -> None:
    text, value, numbers = an_expression(random.Random(seed), 4)
    assert value_with(text, numbers) == value
    if value is not None:
        assert value_with(f"{text} = {value}", numbers) == (
            value if abs(value.denominator) < 10**9 else None
        )
        assert value_with(f"{text} = {value + 1}", numbers) is None
    assert value_with(text, [*numbers, 1]) is None and value_with(text, numbers[1:]) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("2 * 3 + 1", 7),
        ("8 - 2 - 1", 5),
        ("8 / 2 / 2", 2),
        ("8 - 2 + 1", 7),
        ("2 * (3 + 4)", 14),
        ("((5))", 5),
        ("6 \u00d7 2 \u00f7 3 \u2212 1", 3),
        ("1.5 * 2", 3),
        ("8 / (3 - 8 / 3)", 24),
        ("8/2*4", 16),
    ],
)
def test_operators_bind_as_usual(text: str, value: int) -> None:
    assert value_with(text, numbers_in(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "()",
        "1 2",
        "1 +",
        "+ 1",
        "-1",
        "1 -- 2",
        "(1",
        "1)",
        "(1))(",
        "1 ** 2",
        "1 // 2",
        "x",
        "1 + (2",
        "2(3)",
        "(2)3",
        "1e5",
        "__import__('os')",
        "1 = 2",
        "9999999999 - 1",
        "1 " + "+" * 100_000 + " 2",
        "(" * 10_000 + "1" + ")" * 10_000,
        "(1, 2)",
        "(*1)",
        "1.2.3",
        "(1).2",
        "n + 1",
        "... + " * 100_000 + "1",
        "() + " * 100_000 + "1",
        "1 * 2" + "()" * 10_000,
        "1 * 2 - ...",
        "- 1",
        "1 + + 2",
        "\u0661 + 1",
    ],
)
def test_invalid_expressions(text: str) -> None:
    assert value_with(text, numbers_in(text)) is None


def test_steps_become_an_expression() -> None:
    draw = random.Random(3)
    for _ in range(50):
        numbers, target = a_puzzle(draw)
        steps = next(solutions(numbers, target, whole=False), None)
        if steps:
            assert value_with(f"{of_steps(steps)} = {target}", numbers) == target, (numbers, steps)
    twice = (PuzzleStep(6, "/", 1, 6, (6, 6)), PuzzleStep(6, "+", 6, 12, (12,)))
    assert value_with(of_steps(twice), (1, 6, 6)) == 12


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "1+" * 100_000 + "1",
        "(" * 50_000 + "1" + ")" * 50_000,
        "9" * 200_000,
        " " * 200_000,
        "4 + 9 = 13 (left: " + "1" * 200_000,
        "1 + 1 = " + "2 " * 100_000,
    ],
)
def test_long_texts_take_no_long_time(text: str) -> None:
    """More than linear time would run into the time limit of a test."""
    read_step(text)
    apply_steps((4, 9), text)
    value_with(text, (4, 9))
    read_judgement(text)
