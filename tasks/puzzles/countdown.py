r"""Make the target: combine numbers step by step, whole results only.

Data: JSON Lines, such as the puzzles that come with treegen:

    {"id": "countdown-0", "numbers": [4, 6, 6], "target": 18}

The prompt shows solved puzzles, one step a line with what is left after it (see countdown_text).
"""

from pathlib import Path
from typing import Any, Final

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem, Skipped
from treegen.evals.task import TaskOptions
from treegen.tasks.common.jsonl import parse_rows, read_rows, text_field
from treegen.tasks.gsm8k.data import read_bundled
from treegen.tasks.puzzles.base import PuzzleTask, as_problem, read_puzzle

_BUNDLED: Final = "countdown_sample.jsonl"


class Countdown(PuzzleTask):
    """Puzzles with their own targets, from a JSONL file."""

    name = "countdown"
    whole = True
    examples = "countdown_fewshot.jsonl"

    def read(self, options: TaskOptions) -> tuple[list[Problem], tuple[Skipped, ...], str]:
        """Return the puzzles of a file, or those that come with treegen.

        Raises:
            InputError: `split` goes with a directory or a named data set only.
            DataError: the file cannot be read, or has no usable puzzle.
        """
        if options.data is None:
            if options.split is not None:
                raise DataError("the bundled puzzles have no splits; give a data file")
            rows, source = parse_rows(read_bundled(_BUNDLED), _BUNDLED), f"bundled {_BUNDLED}"
        else:
            path = Path(options.data)
            if path.is_dir():
                path = path / f"{options.split or 'test'}.jsonl"
            elif options.split is not None:
                raise InputError(f"split {options.split!r} needs a directory, not {options.data!r}")
            rows, source = read_rows(path), str(path)
        problems: dict[str, Problem] = {}
        skipped: list[Skipped] = []
        for line, row in rows:
            try:
                problem = as_problem(_id(row, line), *read_puzzle(row), line=line)
            except ValueError as error:
                skipped.append(Skipped(source, line, str(error)))
                continue
            if problem.id in problems:
                first = problems[problem.id].metadata["line"]
                raise DataError(
                    f"{source}, lines {first} and {line} have the same id {problem.id!r}"
                )
            problems[problem.id] = problem
        if not problems:
            raise DataError(f"{source} has no usable puzzle; {skipped[0]}")
        return list(problems.values()), tuple(skipped), source


def _id(row: dict[str, Any], line: int) -> str:
    given = row.get("id")
    if given is None:
        return f"countdown-{line - 1}"
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError("id is neither text nor a whole number")
    return text_field({"id": str(given)}, "id")
