r"""Make the target: combine numbers step by step, whole results only.

Data: JSON Lines, such as the puzzles that come with treegen:

    {"id": "countdown-0", "numbers": [4, 6, 6], "target": 18}

The prompt shows solved puzzles, one step a line with what is left after it (see countdown_text).
"""

from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.problem import Problem, Skipped
from treegen.evals.task import TaskOptions
from treegen.tasks.common.jsonl import read_rows
from treegen.tasks.common.problems import problems_of, row_id, split_file
from treegen.tasks.common.sources import bundled_rows
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
            InputError: a split is named, but `data` is no directory.
            DataError: the file cannot be read, or has no usable puzzle.
        """
        if options.data is None:
            if options.split is not None:
                raise DataError("the bundled puzzles have no splits; give a data file")
            rows, source = bundled_rows(_BUNDLED), f"bundled {_BUNDLED}"
        else:
            path = split_file(options.data, options.split)
            rows, source = read_rows(path), str(path)
        problems, skipped = problems_of(rows, source, _problem, noun="puzzle")
        return list(problems), skipped, source


def _problem(row: dict[str, Any], line: int) -> Problem:
    return as_problem(row_id(row, line, "countdown"), *read_puzzle(row), line=line)
