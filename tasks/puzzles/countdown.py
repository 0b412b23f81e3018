r"""Make the target: combine numbers step by step, whole results only.

Data: JSON Lines, such as the puzzles that come with treegen:

    {"id": "countdown-0", "numbers": [4, 6, 6], "target": 18}

The prompt shows solved puzzles, one step per line with the numbers left after it (see
countdown_text).
"""

from typing import Any, Final

from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.tasks.common.problems import problems_of, row_id
from treegen.tasks.common.sources import Source
from treegen.tasks.common.text_task import Loaded
from treegen.tasks.puzzles.base import PuzzleTask, as_problem, read_puzzle

_SOURCE: Final = Source(task="countdown", bundled="countdown_sample.jsonl")


class Countdown(PuzzleTask):
    """Puzzles with their own targets, from a JSONL file."""

    name = "countdown"
    whole = True
    examples = "countdown_fewshot.jsonl"

    def read(self, options: TaskOptions) -> Loaded:
        """Return the puzzles of a file, or the bundled ones."""
        rows, source = _SOURCE.read(options.data, options.split)
        return *problems_of(rows, source, _problem, noun="puzzle"), source


def _problem(row: dict[str, Any], line: int) -> Problem:
    return as_problem(row_id(row, line, "countdown"), *read_puzzle(row), line=line)
