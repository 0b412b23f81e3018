"""Reads the stored judgements of a run; nothing here calls a judge."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from treegen.errors import InputError, RunError
from treegen.evals.statistics.tables import Cell, Table
from treegen.grading.answers import addresses_judge
from treegen.grading.running import stored
from treegen.grading.summary import Summary, summarise

_MAX_ROWS: Final = 10


def load_summaries(path: Path, groups: Mapping[str, str], notices: list[str]) -> list[Summary]:
    """Return a summary of each group of judge runs that is stored with a run.

    Args:
        path: The run directory.
        groups: The group of each problem, by problem id.
        notices: Gets one sentence if stored judgements cannot be read.
    """
    summaries: list[Summary] = []
    try:
        for judge_runs in stored(path):
            summaries.append(summarise(judge_runs, groups=groups))
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
