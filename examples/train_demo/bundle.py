"""Write held-out problems in the tasks' own formats: `python -m train_demo.bundle OUT`.

Every problem is reserved (see held_out), so none of them is ever trained on; the few-shot examples
that stand before them are such as training has.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from train_demo.programs import Program, program
from train_demo.puzzles import Numbers, Puzzle, operations, puzzle
from train_demo.words import WordProblem, word_problem

WORDS: Final = 240
PUZZLES: Final = 100
# How many programming problems have so many steps, of which so many are hidden.
PROGRAMS: Final = ((2, 0, 6), (3, 0, 6), (1, 1, 24), (2, 1, 12), (3, 1, 12))
# Puzzles that random steps seldom solve: of the many ways through them, so few are right.
WAYS: Final = range(1, 5)
TESTS: Final = 6


def word_problems(draw: random.Random, num: int, *, evaluation: bool) -> Iterator[WordProblem]:
    """Yield different problems of two to four steps."""
    seen: set[str] = set()
    while len(seen) < num:
        steps = draw.choice((2, 3, 3, 4, 4))
        problem = word_problem(draw, draw.choice((2, 3, 4, 5)), evaluation=evaluation)
        if len(problem.steps) == steps and problem.key not in seen:
            seen.add(problem.key)
            yield problem


def program_problems(draw: random.Random, *, evaluation: bool) -> Iterator[Program]:
    """Yield different problems of the kinds in PROGRAMS."""
    seen: set[str] = set()
    for steps, hidden, num in PROGRAMS:
        while num:
            problem = program(draw, steps, hidden, num_tests=TESTS, evaluation=evaluation)
            if problem.key not in seen:
                seen.add(problem.key)
                num -= 1
                yield problem


def ways(numbers: Numbers, target: int) -> int:
    """Return how many sequences of operations lead to the target."""
    if len(numbers) == 1:
        return int(numbers[0] == target)
    return sum(ways(operation.rest, target) for operation in operations(numbers))


def puzzles(draw: random.Random, num: int, *, evaluation: bool) -> Iterator[Puzzle]:
    """Yield different puzzles of four numbers that few ways lead through."""
    seen: set[tuple[Numbers, int]] = set()
    while len(seen) < num:
        new = puzzle(draw, 4, evaluation=evaluation)
        if (new.numbers, new.target) not in seen and ways(new.numbers, new.target) in WAYS:
            seen.add((new.numbers, new.target))
            yield new


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(file.read_text(encoding='utf-8').splitlines())} rows")


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=1, show_default=True)
def main(out: Path, seed: int) -> None:
    """Write the data files to OUT."""
    out.mkdir(parents=True, exist_ok=True)

    def draw(what: str) -> random.Random:
        return random.Random(f"{what} {seed}")

    _write(
        out / "words.jsonl",
        (
            {"id": f"words-{number}", "question": problem.question, "answer": problem.reference()}
            for number, problem in enumerate(word_problems(draw("words"), WORDS, evaluation=True))
        ),
    )
    _write(
        out / "words_fewshot.jsonl",
        (
            {"question": problem.question, "target": problem.target()}
            for problem in word_problems(draw("words fewshot"), 8, evaluation=False)
        ),
    )
    problems = list(program_problems(draw("programs"), evaluation=True))
    _write(out / "programs.jsonl", (problem.row(number) for number, problem in enumerate(problems)))
    shots = [program(draw(f"shown {k}"), 2, k % 2, num_tests=TESTS) for k in range(4)]
    _write(out / "programs_fewshot.jsonl", (problem.row(k) for k, problem in enumerate(shots)))
    _write(
        out / "puzzles.jsonl",
        (
            {
                "id": f"puzzle-{number}",
                "numbers": list(problem.numbers),
                "target": problem.target,
                "solution": problem.solution,
            }
            for number, problem in enumerate(puzzles(draw("puzzles"), PUZZLES, evaluation=True))
        ),
    )


if __name__ == "__main__":
    main()
