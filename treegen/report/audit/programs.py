"""Compares the programs that a run has read from its samples with those of other readers."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from treegen.report.audit.equivalence import find_programs
from treegen.report.audit.findings import Finding, find
from treegen.report.view import RunView, Sample


def audit_programs(view: RunView) -> Iterator[Finding]:
    """Yield the findings on the programs of a run; nothing is run.

    Only samples that failed are read again, because a program that passes its tests was found.
    """
    headline = view.filters[0] if view.filters else ""
    missed: list[Sample] = []
    broken: list[Sample] = []
    redefined: list[Sample] = []
    found: dict[tuple[str, ...], dict[str, str | None] | None] = {}
    for problem in view.problems:
        names = re.findall(r"^\s*(?:def|class)\s+(\w{1,80})", problem.question, re.MULTILINE)[-1:]
        for sample in problem.samples:
            verdict = (sample.verdicts or {}).get(headline)
            if verdict is None or verdict.correct:
                continue
            text = sample.parts[1]
            key = (text, *names)
            if key not in found:
                found[key] = find_programs(text, names)
            programs = found[key] or {}
            best, outcome = programs.get("evalplus"), str(getattr(verdict, "outcome", ""))
            if verdict.answer is None and best:
                missed.append(sample)
            elif "compile" in outcome and best and sample.finish_reason != "length":
                broken.append(sample)
            elif _differ(programs, names):
                redefined.append(sample)
    for name, cases in (
        ("program-not-found", missed),
        ("program-does-not-compile", broken),
        ("several-programs", redefined),
    ):
        yield from find(name, cases, view.num_done)


def _differ(programs: Any, names: Sequence[str]) -> bool:
    first, last = programs.get("first block"), programs.get("last block")
    if not first or not last or first == last or not names:
        return False
    return all(re.search(rf"\b(?:def|class)\s+{re.escape(names[0])}\b", p) for p in (first, last))
