"""Finds problems of published data in runs of tasks with other names."""

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from treegen.report.audit.faulty import hash_question
from treegen.report.audit.findings import Finding, find
from treegen.report.view import ProblemView

_DIGITS: Final = 12  # of a hash, 6 bytes


@cache
def _read_published() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the name of the data and names of its tasks, by the hash of a question.

    A line of published.jsonl has the hashes of one split: the first 6 bytes of `hash_question`, in
    base64.
    """
    text = files("treegen.report.audit").joinpath("published.jsonl").read_text(encoding="utf-8")
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for split in map(json.loads, text.splitlines()):
        digits = b64decode(split["items"]).hex()
        of = f"{split['name']} ({split['split']})", tuple(split["tasks"])
        found |= {digits[at : at + _DIGITS]: of for at in range(0, len(digits), _DIGITS)}
    return found


def audit_names(task: str, problems: Sequence[ProblemView]) -> Iterator[Finding]:
    """Yield a finding on problems that were published under another name than the task's.

    Args:
        task: The name of the task.
        problems: Its problems, which have questions.
    """
    published, cases = _read_published(), []
    for problem in problems:
        name, tasks = published.get(hash_question(problem.question)[:_DIGITS], ("", ()))
        if name and not any(known in task.casefold() for known in tasks):
            cases.append((problem.id, f"{name}: {problem.question}"))
    yield from find("published-elsewhere", cases, len(problems), unit="problems")
