r"""Game of 24: make 24 from four numbers.

Data: 24.csv of the tree-of-thoughts paper (https://github.com/princeton-nlp/tree-of-thought-llm),
1,362 puzzles from easy to hard. Its ranks 901 to 1000 are the paper's test set and the default.

A solution is steps, as in the countdown task, or one line with `--task-arg form=expression`:

    Input: 4 9 10 13\nTarget: 24\nAnswer: (10 - 4) * (13 - 9) = 24

Intermediate results may be any numbers. A solution in either form counts, whichever form is set.
Python's parser reads the brackets and operators of an expression, and nothing is run. The result is
exact, and the time is linear. The parser may not read more than about 100 nested brackets.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Final

from treegen.errors import DataError, InputError, arg
from treegen.evals.arguments import one_of
from treegen.evals.problem import Problem, Skipped
from treegen.evals.task import TaskData, TaskOptions
from treegen.tasks.common.files import csv_rows
from treegen.tasks.common.text_task import Loaded
from treegen.tasks.puzzles.base import Puzzle, PuzzleTask, as_problem, puzzle_of, read_puzzle
from treegen.tasks.puzzles.puzzle import (
    Number,
    PuzzleStep,
    combine,
    numbers_text,
    read_number,
)

# This also matches numbers longer than any number of a puzzle; `read_number` rejects these.
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_FORM: Final = re.compile(r"[-+*/() 1]+")  # an expression whose every number is replaced by 1
_SIGNS: Final = str.maketrans("\u00d7\u00f7\u2212", "*/-")
_OPERATORS: Final[dict[type, str]] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def value_with(text: str, numbers: Sequence[Number]) -> Number | None:
    """Return the value of a text that is an expression, or an equation of one with its value.

    Returns:
        None unless the text uses each of the numbers exactly once, without unary signs, and is
        true.
    """
    left, equals, right = text.partition("=")
    expression = " ".join(left.translate(_SIGNS).split())
    operands = list(map(read_number, _NUMBER.findall(expression)))
    form = _NUMBER.sub("1", expression)
    num_operators = sum(map(form.count, "+-*/"))
    # Compare the numbers and count the operators before computing anything, so that `_evaluate`
    # cannot recurse deeply, and no calculation can be long.
    if not _FORM.fullmatch(form) or num_operators != len(numbers) - 1:
        return None
    if Counter(operands) != Counter(numbers):
        return None
    try:
        tree = ast.parse(form, mode="eval")
    except (SyntaxError, MemoryError, RecursionError):  # errors of Python's parser
        return None
    value = _evaluate(tree.body, iter(operands))
    if value is None or (equals and read_number(right.strip().rstrip(".")) != Fraction(value)):
        return None
    return value


def _evaluate(node: ast.expr, operands: Iterator[Number | None]) -> Number | None:
    """Return the exact value; None for a division by zero, and for what is no calculation."""
    if isinstance(node, ast.Constant):
        return next(operands)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    a, b = _evaluate(node.left, operands), _evaluate(node.right, operands)
    return None if a is None or b is None else combine(a, _OPERATORS[type(node.op)], b)


def of_steps(steps: Sequence[PuzzleStep]) -> str:
    """Return the expression of a list of steps. Results that later steps use are in brackets."""
    results: list[tuple[Number, str]] = []
    text = ""
    for step in steps:
        sides = [_take(results, number) for number in (step.a, step.b)]
        text = f"{sides[0]} {step.op} {sides[1]}"
        results.append((step.c, f"({text})"))
    return text


def _take(results: list[tuple[Number, str]], number: Number) -> str:
    """Return and remove the text of a number that a step made; without one, return the number."""
    for index, (value, text) in enumerate(results):
        if value == number:
            del results[index]
            return text
    return str(number)


FORMS: Final = ("steps", "expression")
TARGET: Final = 24
_SPLITS: Final = {"test": range(901, 1001), "train": range(1, 901), "all": range(1, 10**6)}


class Game24(PuzzleTask):
    """The puzzles of the tree-of-thoughts paper."""

    name = "game24"
    needs_data = "the 24.csv from the paper"
    whole = False
    examples = "game24_fewshot.jsonl"
    arguments: ClassVar = {"form": "how solutions are written: steps or expression; default: steps"}
    search_defaults = replace(PuzzleTask.search_defaults, arguments={"form": "steps"})

    _form = "steps"  # until `configure` sets another

    def configure(self, arguments: Mapping[str, str]) -> None:
        """Set the form from the task's arguments."""
        self._form = one_of(arguments, "form", FORMS, "steps")

    def read(self, options: TaskOptions) -> Loaded:
        """Return the puzzles of a split.

        Raises:
            InputError: There is no file, or no such split.
            DataError: The file cannot be read, or has no puzzle of the split.
        """
        if options.data is None:
            raise InputError(
                f"game24 has no bundled puzzles; set {arg('data=')} to {self.needs_data}"
            )
        split = options.split or "test"
        if split not in _SPLITS:
            raise InputError(f"game24 has no split {split!r}; use one of {', '.join(_SPLITS)}")
        path = Path(options.data)
        path = path / "24.csv" if path.is_dir() else path
        problems: list[Problem] = []
        skipped: list[Skipped] = []
        for rank, (line, numbers) in enumerate(_read_csv(path), start=1):
            if rank not in _SPLITS[split]:
                continue
            try:
                words = numbers.split()
                if not all(word.isascii() and word.isdecimal() and len(word) < 8 for word in words):
                    raise ValueError(
                        f"{numbers[:40]!r} is not a puzzle; write integers separated by spaces"
                    )
                row = {"numbers": [int(word) for word in words], "target": TARGET}
                problems.append(as_problem(f"game24-{rank}", *read_puzzle(row), rank=rank))
            except ValueError as error:
                skipped.append(Skipped(str(path), line, str(error)))
        if not problems:
            raise DataError(
                f"{path} has no puzzle in split {split} (ranks {_ranks(split)}); "
                "use another split, or pass the complete 24.csv"
            )
        return problems, tuple(skipped), f"{path}, ranks {_ranks(split)}"

    def head(self, puzzle: Puzzle) -> str:
        """Return the text of a puzzle, up to where its steps, or its expression, begin."""
        if self._form == "steps":
            return super().head(puzzle)
        return f"Input: {numbers_text(puzzle.numbers)}\nTarget: {puzzle.target}\nAnswer:"

    def example(self, puzzle: Puzzle) -> str:
        """Return a puzzle with its solution."""
        if self._form == "steps":
            return super().example(puzzle)
        return f"{self.head(puzzle)} {of_steps(puzzle.steps)} = {puzzle.target}"

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the prompt up to where the steps begin.

        Raises:
            InputError: The form of solutions is not "steps".
        """
        if self._form != "steps":
            raise InputError("a search needs solutions in steps; set the task argument form=steps")
        return super().root(data, problem)

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the number left after the steps, or the value of an expression."""
        reached = super().answer(problem, text)
        if reached is not None:
            return reached
        _, marker, after = text.rpartition("Answer:")
        line = (after if marker else text).strip().partition("\n")[0]
        value = value_with(line, puzzle_of(problem).numbers)
        return None if value is None else str(value)


def _read_csv(path: Path) -> list[tuple[int, str]]:
    """Return the line numbers and the texts of the puzzles in a file."""
    rows = list(csv_rows(path))
    if not rows or "Puzzles" not in rows[0][1]:
        raise DataError(f"{path} has no column Puzzles; pass the 24.csv from the paper")
    return [(line, row["Puzzles"] or "") for line, row in rows]


def _ranks(split: str) -> str:
    span = _SPLITS[split]
    return f"{span[0]} to {span[-1]}" if split != "all" else "all"
