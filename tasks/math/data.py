"""Reads MATH and MATH-500 from the authors' folders of JSON, JSON Lines, Parquet, or the hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.problem import Problem
from treegen.tasks.answers.maths import without_dollars
from treegen.tasks.common.files import Rows, column, optional, read_data
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.math.boxed import extract_boxed

_SUBJECTS: Final = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class MathSource(Source):
    """The places from which rows can come, including the authors' folders."""

    def from_files(self, data: str, split: str | None, default: str) -> tuple[Rows, str]:
        """Return the rows of a folder of subjects, or of a file, and its path.

        Args:
            data: Path of a file, or of a folder with a file or folder for each split.
            split: The split to read from a folder; None for `default`.
            default: The split to read from a folder if `split` is None.
        """
        folder = Path(data) / (split or default)
        if folder.is_dir():
            return _folder_rows(folder), str(folder)
        return super().from_files(data, split, default)


_BUNDLED: Final = "math_sample.jsonl"
_HUB: Final = HubTable("EleutherAI/hendrycks_math", ("test", "train"), _SUBJECTS)
MATH: Final = MathSource(task="math", bundled=_BUNDLED, hub=_HUB)
MATH_500: Final = MathSource(
    task="math500", bundled=_BUNDLED, hub=HubTable("HuggingFaceH4/MATH-500")
)


def final_answer(row: dict[str, Any]) -> str:
    r"""Return a row's answer: its own column, otherwise the last box of its solution.

    Raises:
        ValueError: The row has no answer.
    """
    if (answer := optional(row, ("answer",))) is not None:
        return without_dollars(answer)
    boxed = extract_boxed(column(row, ("solution",)))
    if not boxed or not boxed.strip():
        raise ValueError("no answer, and the solution boxes none")
    return boxed


def read_problem(row: dict[str, Any], line: int) -> Problem:
    """Return the problem of a row; raise ValueError with the reason if it has none."""
    level = re.search(r"[1-5]", optional(row, ("level",)) or "")
    subject = optional(row, ("subject", "type")) or ""
    return Problem(
        id=optional(row, ("unique_id", "id")) or f"math-{line - 1}",
        question=column(row, ("problem", "question")),
        answer=final_answer(row),
        metadata={
            "line": line,
            "subject": subject,
            "level": int(level[0]) if level else None,
            "solution": optional(row, ("solution",)) or "",
        },
    )


def _folder_rows(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON files of a folder of subjects, in the order of subjects and numbers."""
    paths = sorted(folder.glob("*/*.json"), key=lambda path: (path.parent.name, _number(path)))
    if not paths:
        raise DataError(
            f"{folder} has no file such as algebra/1.json; give the folder with train/ and test/"
        )
    for number, path in enumerate(paths, start=1):
        content = read_data(path)
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}; download it again") from None
        if not isinstance(row, dict):
            raise DataError(f"{path} is not a JSON object; download it again")
        yield number, {"unique_id": f"{folder.name}/{path.parent.name}/{path.name}", **row}


def _number(path: Path) -> tuple[int, str]:
    digits = re.fullmatch(r"[0-9]{1,9}", path.stem)
    return (int(path.stem) if digits else 0, path.stem)
