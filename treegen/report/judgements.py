"""Reads the stored judgements of a run; nothing here calls a judge."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from treegen.errors import InputError, Message, RunError, arg
from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.pipeline import load_juries, progress_of
from treegen.evals.judging.prompts import addresses_judge
from treegen.evals.judging.summary import Summary, summarise
from treegen.evals.statistics.tables import Cell, Table

_MAX_ROWS: Final = 10


def describe_missing(done: int, planned: int) -> list[str]:
    """Return a sentence that says how many judgements are missing; an empty list if none is."""
    if done >= planned:
        return []
    missing = f"{planned - done:,} judgements are missing"
    again = f"judge the run again with the same {arg('judge=')} and {arg('rubric=')} to add them"
    return [Message(f"{missing}; {again}")]


def count_judgements(
    path: Path, juries: Iterable[Sequence[JudgementSet]], samples: Sequence[tuple[str, int]]
) -> tuple[int, int]:
    """Return how many judgements of a run are stored, and how many are planned.

    Comparisons of pairs are not counted, because the other runs may be gone.

    Args:
        path: The run directory.
        juries: Stored judge runs, grouped in juries.
        samples: Problem id and sample index of each sample.
    """
    done = planned = 0
    for judged in (judged for jury in juries for judged in jury):
        if not judged.judging.settings.rubric.pairs:
            has, wants = progress_of(path, judged.judging, samples)
            done, planned = done + has, planned + wants
    return done, planned


def load_summaries(
    path: Path, groups: Mapping[str, str], samples: Sequence[tuple[str, int]], notices: list[str]
) -> list[Summary]:
    """Return a summary of each group of judge runs that is stored with a run.

    Args:
        path: The run directory.
        groups: The group of each problem, by problem id.
        samples: Problem id and sample index of each sample.
        notices: Gets a sentence if judgements cannot be read, or if some are missing.
    """
    summaries: list[Summary] = []
    try:
        juries = load_juries(path)
        for jury in juries:
            summaries.append(summarise(jury, groups=groups))
        notices += describe_missing(*count_judgements(path, juries, samples))
    except (InputError, RunError) as error:
        notices.append(f"judgements cannot be shown: {error}")
    return summaries


def build_flagged_table(texts: Iterable[tuple[str, int, str]]) -> Table | None:
    """Return a table of the answers that seem to address their judge; None if there are none.

    Args:
        texts: Problem id, sample index and text of each answer.
    """
    flagged = [
        (problem, index, reasons)
        for problem, index, text in texts
        if (reasons := addresses_judge(text))
    ]
    if not flagged:
        return None
    rows: list[tuple[Cell, ...]] = [
        (problem, index, "; ".join(reasons)) for problem, index, reasons in flagged[:_MAX_ROWS]
    ]
    title = "1 answer addresses" if len(flagged) == 1 else f"{len(flagged):,} answers address"
    title += " the judge"
    more = f", such as {len(rows):,} of them" if len(rows) < len(flagged) else ""
    return Table(title + more, ("Problem", "Sample", "What they do"), tuple(rows))
