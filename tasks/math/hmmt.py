r"""HMMT: problems of the Harvard-MIT Mathematics Tournament, whose answers are expressions.

Data: the problems belong to HMMT and do not come with treegen. `hf` is MathArena's tables of them
(MathArena/hmmt_feb_2025, hmmt_nov_2025 and hmmt_feb_2026; CC BY-NC-SA 4.0); files with their
columns are read too. One row:

    {"problem_idx": 1, "problem": "Compute ...", "answer": "\\frac{1}{576}",
     "problem_type": ["Number Theory"]}

The prompt is the problem and a line that asks for a boxed answer, as MathArena's. Samples are drawn
as for `aime`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from treegen.errors import InputError
from treegen.evals.arguments import check_arguments, words
from treegen.evals.problem import Problem, Skipped
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.tasks.common.files import Rows, column, optional
from treegen.tasks.common.problems import problems_of
from treegen.tasks.common.reasoning import SAMPLING, check_no_examples, chosen
from treegen.tasks.common.sources import HubTable, bundled_rows, file_rows
from treegen.tasks.math.competition import Competition

CONTESTS: Final = ("feb_2025", "nov_2025", "feb_2026")
_BUNDLED: Final = "hmmt_sample.jsonl"


class HMMT(Competition):
    """HMMT with 64 samples of each problem; the headline filter is math-verify's judgement."""

    name = "hmmt"
    version = "1"
    groups = ("contest", "subject")
    arguments: Final[Mapping[str, str]] = {
        "contest": f"of hf: {', '.join(CONTESTS)}, or several with a comma; default: all"
    }
    defaults: Final = TaskDefaults(sampling=SAMPLING, num_samples=64, num_fewshot=0)

    def load(self, options: TaskOptions) -> TaskData:
        """Read the problems of the contests that are asked for.

        Raises:
            InputError: an option cannot be used.
            DataError: the problems cannot be read.
        """
        check_arguments(self.name, options.extra, self.arguments)
        check_no_examples(self.name, options)
        asked = words(options.extra, "contest")
        if asked and (options.data != "hf" or not {*asked} <= {*CONTESTS}):
            raise InputError(
                f"-T contest chooses among {', '.join(CONTESTS)} of data='hf'; leave it out of "
                "other data"
            )
        problems: list[Problem] = []
        skipped: list[Skipped] = []
        sources = []
        for rows, source, contest in _tables(options, asked or CONTESTS):
            found, bad = problems_of(rows, source, partial(_problem, contest=contest))
            problems += found
            skipped += bad
            sources.append(source)
        return chosen(problems, tuple(skipped), " and ".join(sources), options)


def _tables(options: TaskOptions, contests: tuple[str, ...]) -> list[tuple[Rows, str, str]]:
    """Rows, their source and their contest, empty where the data do not tell."""
    if options.data is None:
        return [(bundled_rows(_BUNDLED, options.split), f"bundled {_BUNDLED}", "")]
    if options.data != "hf":
        rows, source = file_rows(options.data, options.split)
        return [(rows, source, "")]
    tables = [(HubTable(f"MathArena/hmmt_{each}", ("train",)), each) for each in contests]
    return [(table.rows(options.split, "a file"), table.name, each) for table, each in tables]


def _problem(row: dict[str, Any], line: int, contest: str) -> Problem:
    number = optional(row, ("id", "problem_idx")) or str(line - 1)
    kinds = row.get("problem_type")
    subject = kinds[0] if isinstance(kinds, list | tuple) and kinds else kinds
    return Problem(
        id="-".join(each for each in ("hmmt", contest, number) if each),
        question=column(row, ("problem", "question")),
        answer=column(row, ("answer",)).strip(),
        metadata={
            "line": line,
            "contest": contest or optional(row, ("contest",)),
            "subject": subject if isinstance(subject, str) else None,
        },
    )
