"""Problems that published lists call faulty."""

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from treegen.common.files import read_limited
from treegen.errors import InputError
from treegen.report.view import ProblemView

_MOST_BYTES: Final = 16 << 20


def hash_question(question: str) -> str:
    """Return a hash of the letters and digits of a question and its choices."""
    letters = "".join(filter(str.isalnum, question.casefold()))
    return hashlib.sha256(letters.encode()).hexdigest()[:16]


@cache
def _published() -> dict[str, str]:
    """Return what is wrong with the items of faulty.jsonl, by id or by `hash_question`.

    HumanEval: items with a faulty example, test or solution; those whose prompt has only a spelling
    error are left out. MMLU: all items that MMLU-Redux marks, of 100 in each subject.
    """
    text = files("treegen.report.audit").joinpath("faulty.jsonl").read_text(encoding="utf-8")
    lists = map(json.loads, text.splitlines())
    return {item: f"{one['what']} ({one['source']})" for one in lists for item in one["items"]}


def read_faulty_ids(path: Path) -> dict[str, str]:
    """Return the ids of problems in a file, each with the name of the file.

    Args:
        path: A text file with one id in each line. Empty lines, and those that begin with "#", are
            skipped.

    Raises:
        InputError: the file cannot be read, is no text, is larger than 16 MiB, or has no id.
    """
    try:
        lines = map(str.strip, read_limited(path, _MOST_BYTES).decode("utf-8-sig").splitlines())
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8; write one id of a problem in each line") from None
    ids = {line: path.name for line in lines if line and not line.startswith("#")}
    if not ids:
        raise InputError(f"{path} has no id; write one id of a problem in each line")
    return ids


def why_faulty(problem: ProblemView, listed: dict[str, str]) -> str | None:
    """Return why a problem is faulty and who says so; None if no list has it.

    Args:
        problem: The problem.
        listed: Further ids, from `read_faulty_ids`.
    """
    published = _published()
    return (
        listed.get(problem.id)
        or published.get(problem.id)
        or published.get(hash_question(problem.question))
    )
