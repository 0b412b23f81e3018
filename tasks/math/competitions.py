r"""AIME and HMMT: competition problems that come with their answers, but not with treegen.

AIME, the American Invitational Mathematics Examination, has answers from 0 to 999. Its problems
belong to the Mathematical Association of America. `hf` is HuggingFaceH4/aime_2024, math-ai/aime25
and MathArena/aime_2026; Maxwell-Jia/AIME_2024 and opencompass/AIME2025 can be read too. One row:

    {"ID": "2024-I-1", "Problem": "How many ...?", "Solution": "...", "Answer": 204}

HMMT, the Harvard-MIT Mathematics Tournament, has expressions as answers. Its problems belong to
HMMT. `hf` is MathArena's tables of them (MathArena/hmmt_feb_2025, hmmt_nov_2025 and hmmt_feb_2026;
CC BY-NC-SA 4.0). One row:

    {"problem_idx": 1, "problem": "Compute ...", "answer": "\\frac{1}{576}",
     "problem_type": ["Number Theory"]}

Files with these columns can be read too. The prompt is the problem and a line that asks for a boxed
answer, as in MathArena. Samples are drawn as for DeepSeek-R1 (2025): 64 of each problem,
temperature 0.6, top-p 0.95, at most 32,768 tokens.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from treegen.errors import InputError, arg
from treegen.evals.arguments import words
from treegen.evals.problem import Problem, Skipped
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.tasks.answers.maths import without_dollars
from treegen.tasks.common.files import column, optional
from treegen.tasks.common.sources import HubTable, Source, problems_of
from treegen.tasks.common.text_task import REASONING, Loaded
from treegen.tasks.math.task import Competition

_DEFAULTS: Final = TaskDefaults(sampling=REASONING, num_samples=64, num_fewshot=0)


def _read_tables(
    tables: Iterable[tuple[str, HubTable]],
    split: str | None,
    make: Callable[..., Problem],
) -> Loaded:
    """Return the problems of several tables of the hub.

    Args:
        tables: The tables, each with the name of its contest.
        split: The split to read; None for the default.
        make: Makes a problem from (row, line, contest).
    """
    problems: list[Problem] = []
    skipped: list[Skipped] = []
    sources = []
    for contest, table in tables:
        rows = table.rows(split)
        read, bad = problems_of(rows, table.name, partial(make, contest=contest))
        problems += read
        skipped += bad
        sources.append(table.name)
    return problems, tuple(skipped), " and ".join(sources)


# The tables of AIME that "hf" names, by year, and other tables with the same problems.
_OF_YEAR: Final = {
    "2024": HubTable("HuggingFaceH4/aime_2024", ("train",)),
    "2025": HubTable("math-ai/aime25", ("test",)),
    "2026": HubTable("MathArena/aime_2026", ("train",)),
}
_OTHER_TABLES: Final = (
    ("2024", HubTable("Maxwell-Jia/AIME_2024", ("train",))),
    ("2025", HubTable("opencompass/AIME2025", ("test",), ("AIME2025-I", "AIME2025-II"))),
)
_TABLES: Final = {table.name: (year, table) for year, table in (*_OF_YEAR.items(), *_OTHER_TABLES)}
# Some tables write 336^\circ for an angle of 336 degrees.
_ANSWER: Final = re.compile(r"\$?([0-9]{1,3})(?:\.0)?(?:\s*\^\{?\\circ\}?)?\$?")


class AIME(Competition):
    """AIME with 64 samples of each problem; the headline filter is math-verify's verdict."""

    name = "aime"
    source = Source(task="aime", bundled="aime_sample.jsonl")
    groups = ("year",)
    arguments: ClassVar = {
        "year": "2024, 2025, 2026, or several separated by commas; default: all in the data"
    }
    defaults: Final = _DEFAULTS

    def read(self, options: TaskOptions) -> Loaded:
        """Return the problems of the requested years."""
        years = words(options.extra, "year")
        if options.data == "hf":
            for year in years:
                if year not in _OF_YEAR:
                    raise InputError(
                        f"the year must be one of {', '.join(_OF_YEAR)} for hf, got {year!r}; "
                        "use one of these years, or pass a file"
                    )
            tables = [(year, _OF_YEAR[year]) for year in years or _OF_YEAR]
            return _read_tables(tables, options.split, _aime_problem)
        if options.data in _TABLES:
            loaded = _read_tables([_TABLES[options.data]], options.split, _aime_problem)
        else:
            loaded = super().read(options)
        problems, skipped, source = loaded
        return _of_years(problems, years, source), skipped, source

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row, which may have the year of the contest."""
        return _aime_problem(row, line, None)


def _aime_problem(row: dict[str, Any], line: int, contest: str | None) -> Problem:
    """Return the problem of a row.

    Args:
        row: The row.
        line: Line number of the row, from 1.
        contest: Year of the contest; None if only the row may name it.
    """
    question = column(row, ("problem", "question"))
    answer = column(row, ("answer",)).strip()
    match = _ANSWER.fullmatch(answer)
    if match is None:
        raise ValueError(f"answer {answer[:20]!r} is not an integer from 0 to 999")
    stated_id = optional(row, ("id", "problem_idx"))
    year = contest or _year(row, stated_id)
    number = line - 1 if stated_id is None else stated_id
    has_year = year is not None and str(number).startswith(year)
    return Problem(
        id=str(number) if has_year else "-".join(["aime", *([year] if year else []), str(number)]),
        question=question,
        answer=str(int(match[1])),
        metadata={"line": line, "year": year},
    )


def _year(row: dict[str, Any], stated_id: str | None) -> str | None:
    """Return the year in a row's column, id or address; None if they have none."""
    for text in (optional(row, ("year",)), stated_id, optional(row, ("url",))):
        if match := re.search(r"(?<![0-9])(?:19|20)[0-9]{2}(?![0-9])", text or ""):
            return match[0]
    return None


def _of_years(problems: Sequence[Problem], years: Sequence[str], source: str) -> Sequence[Problem]:
    if not years:
        return problems
    selected = [problem for problem in problems if problem.metadata["year"] in years]
    if not selected:
        in_data = {str(problem.metadata["year"]) for problem in problems} - {"None"}
        available = ", ".join(sorted(in_data))
        have = (
            (f"has only problems from {available}")
            if available
            else "does not name the year of its rows"
        )
        raise InputError(
            f"{source} has no problem from {' or '.join(years)}; the data set {have}; remove -T "
            "year, or use another year"
        )
    return selected


_CONTESTS: Final = ("feb_2025", "nov_2025", "feb_2026")


class HMMT(Competition):
    """HMMT with 64 samples of each problem; the headline filter is math-verify's verdict."""

    name = "hmmt"
    version = "2"
    source = Source(task="hmmt", bundled="hmmt_sample.jsonl")
    groups = ("contest", "subject")
    arguments: ClassVar = {
        "contest": f"contests of hf, separated by commas: {', '.join(_CONTESTS)}; default: all"
    }
    defaults: Final = _DEFAULTS

    def read(self, options: TaskOptions) -> Loaded:
        """Return the problems of the requested contests."""
        contests = words(options.extra, "contest")
        if contests and (options.data != "hf" or not {*contests} <= {*_CONTESTS}):
            raise InputError(
                f"-T contest must be one of {', '.join(_CONTESTS)} and needs {arg('data', 'hf')}; "
                "remove -T contest for other data"
            )
        if options.data != "hf":
            return super().read(options)
        tables = (
            (contest, HubTable(f"MathArena/hmmt_{contest}", ("train",)))
            for contest in contests or _CONTESTS
        )
        return _read_tables(tables, options.split, _hmmt_problem)

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row, which may have the name of the contest."""
        return _hmmt_problem(row, line, "")


def _hmmt_problem(row: dict[str, Any], line: int, contest: str) -> Problem:
    """Return the problem of a row.

    Args:
        row: The row.
        line: Line number of the row, from 1.
        contest: Name of the contest; empty if only the row may name it.
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
