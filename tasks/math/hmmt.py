r"""HMMT: problems of the Harvard-MIT Mathematics Tournament, whose answers are expressions.

Data: the problems belong to HMMT and do not come with treegen. `hf` is MathArena's tables of them
(MathArena/hmmt_feb_2025, hmmt_nov_2025 and hmmt_feb_2026; CC BY-NC-SA 4.0); files with their
columns are read too. One row:

    {"problem_idx": 1, "problem": "Compute ...", "answer": "\\frac{1}{576}",
     "problem_type": ["Number Theory"]}

The prompt is the problem and a line that asks for a boxed answer, as in MathArena. Samples are
drawn as for `aime`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from treegen.errors import InputError, arg
from treegen.evals.arguments import words
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.tasks.answers.maths import without_dollars
from treegen.tasks.common.files import column, optional
from treegen.tasks.common.problems import RowsToRead, problems_of_all
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import REASONING, Loaded
from treegen.tasks.math.task import Competition

CONTESTS: Final = ("feb_2025", "nov_2025", "feb_2026")
_SOURCE: Final = Source(task="hmmt", bundled="hmmt_sample.jsonl")


class HMMT(Competition):
    """HMMT with 64 samples of each problem; the headline filter is math-verify's verdict."""

    name = "hmmt"
    version = "2"
    groups = ("contest", "subject")
    arguments: ClassVar = {
        "contest": f"of hf: {', '.join(CONTESTS)}, or several with commas; default: all"
    }
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=64, num_fewshot=0)

    def read(self, options: TaskOptions) -> Loaded:
        """Return the problems of the requested contests."""
        contests = words(options.extra, "contest")
        if contests and (options.data != "hf" or not {*contests} <= {*CONTESTS}):
            raise InputError(
                f"-T contest chooses among {', '.join(CONTESTS)} of {arg('data', 'hf')}; leave "
                "it out for other data"
            )
        return problems_of_all(_tables(options, contests or CONTESTS))


def _tables(options: TaskOptions, contests: tuple[str, ...]) -> Iterator[RowsToRead]:
    if options.data != "hf":
        rows, source = _SOURCE.read(options.data, options.split)
        yield rows, source, partial(_problem, contest="")
        return
    for contest in contests:
        table = HubTable(f"MathArena/hmmt_{contest}", ("train",))
        yield table.rows(options.split), table.name, partial(_problem, contest=contest)


def _problem(row: dict[str, Any], line: int, contest: str) -> Problem:
    """Return the problem of a row.

    Args:
        row: The row.
        line: Line number of the row, from 1.
        contest: Name of the contest; empty if the data do not name it.
    """
    number = optional(row, ("id", "problem_idx")) or str(line - 1)
    kinds = row.get("problem_type")
    subject = kinds[0] if isinstance(kinds, list | tuple) and kinds else kinds
    return Problem(
        id="-".join(part for part in ("hmmt", contest, number) if part),
        question=column(row, ("problem", "question")),
        answer=without_dollars(column(row, ("answer",))),
        metadata={
            "line": line,
            "contest": contest or optional(row, ("contest",)),
            "subject": subject if isinstance(subject, str) else None,
        },
    )
