r"""AIME: problems of the American Invitational Mathematics Examination, answers 0 to 999.

Data: the problems belong to the Mathematical Association of America and do not come with treegen.
`hf` is HuggingFaceH4/aime_2024, math-ai/aime25 and MathArena/aime_2026; Maxwell-Jia/AIME_2024 and
opencompass/AIME2025 can be read too, and so can files with their columns. One row:

    {"ID": "2024-I-1", "Problem": "How many ...?", "Solution": "...", "Answer": 204}

The prompt is the problem and a line that asks for a boxed answer. Samples are drawn as for
DeepSeek-R1 (2025): 64 of each problem, temperature 0.6, top-p 0.95, at most 32,768 tokens.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from treegen.errors import InputError
from treegen.evals.arguments import words
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.tasks.common.files import column, optional
from treegen.tasks.common.problems import RowsToRead, problems_of_all
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import REASONING, Loaded
from treegen.tasks.math.task import Competition

YEARS: Final = ("2024", "2025", "2026")
_SOURCE: Final = Source(task="aime", bundled="aime_sample.jsonl")
# The tables that "hf" names, by year, and other tables with the same problems.
_OF_YEAR: Final = {
    "2024": HubTable("HuggingFaceH4/aime_2024", ("train",)),
    "2025": HubTable("math-ai/aime25", ("test",)),
    "2026": HubTable("MathArena/aime_2026", ("train",)),
}
_OTHER_2025: Final = HubTable("opencompass/AIME2025", ("test",), ("AIME2025-I", "AIME2025-II"))
_TABLES: Final = {
    **{table.name: (year, table) for year, table in _OF_YEAR.items()},
    "Maxwell-Jia/AIME_2024": ("2024", HubTable("Maxwell-Jia/AIME_2024", ("train",))),
    _OTHER_2025.name: ("2025", _OTHER_2025),
}
# Some tables write 336^\circ for an angle of 336 degrees.
_ANSWER: Final = re.compile(r"\$?([0-9]{1,3})(?:\.0)?(?:\s*\^\{?\\circ\}?)?\$?")


def _tables(data: str | None, split: str | None, years: Sequence[str]) -> Iterator[RowsToRead]:
    tables = (
        [(year, _OF_YEAR[year]) for year in years] if data == "hf" else [_TABLES.get(data or "")]
    )
    for entry in tables:
        if entry is None:
            rows, source = _SOURCE.read(data, split)
            yield rows, source, partial(_problem, year=None)
        else:
            year, table = entry
            yield table.rows(split), table.name, partial(_problem, year=year)


def _problem(row: dict[str, Any], line: int, year: str | None) -> Problem:
    question = column(row, ("problem", "question"))
    answer = column(row, ("answer",)).strip()
    match = _ANSWER.fullmatch(answer)
    if match is None:
        raise ValueError(f"answer {answer[:20]!r} is not a whole number from 0 to 999")
    stated_id = optional(row, ("id", "problem_idx"))
    year = year or _year(row, stated_id)
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
        have = f"has those of {available}" if available else "does not tell the year of its rows"
        raise InputError(
            f"{source} has no problem of {' or '.join(years)}; it {have}; leave out -T year, or "
            "choose another year"
        )
    return selected


class AIME(Competition):
    """AIME with 64 samples of each problem; the headline filter is math-verify's verdict."""

    name = "aime"
    groups = ("year",)
    arguments: ClassVar = {
        "year": "2024, 2025, 2026 or several with commas; default: all years in the data"
    }
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=64, num_fewshot=0)

    def read(self, options: TaskOptions) -> Loaded:
        """Return the problems of the requested years."""
        years = words(options.extra, "year")
        for year in years:
            if options.data == "hf" and year not in YEARS:
                raise InputError(
                    f"hf has AIME of {', '.join(YEARS)}, not of {year!r}; "
                    "give one of these, or a file"
                )
        tables = _tables(options.data, options.split, years or YEARS)
        problems, skipped, source = problems_of_all(tables)
        chosen = problems if options.data == "hf" else _of_years(problems, years, source)
        return chosen, skipped, source
