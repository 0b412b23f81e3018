"""Compares the programs that a run has read from its samples with those of public sanitizers."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from treegen.report.audit.equivalence import find_programs
from treegen.report.audit.findings import Finding, severity_of
from treegen.report.view import RunView, Sample


def audit_programs(view: RunView) -> Iterator[Finding]:
    """Yield the findings on the programs of a run; nothing is run.

    Only samples that failed are read again, because a program that passes its tests was found.
    """
    headline = view.filters[0] if view.filters else ""
    missed: list[Sample] = []
    broken: list[Sample] = []
    several: list[Sample] = []
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
                several.append(sample)
    yield from _finding(
        view,
        missed,
        "program-not-found",
        "the run found no program here, and evalplus' sanitizer finds one",
        "read these samples; ask for one fenced block",
        (0.02, 0.005),
    )
    yield from _finding(
        view,
        broken,
        "program-does-not-compile",
        "the run's program does not compile, and evalplus' sanitizer finds a part that does",
        "read these samples: prose or a second block may stand in the program",
        (0.05, 0.02),
    )
    yield from _finding(
        view,
        several,
        "several-programs",
        "the first and the last block define the same name, and tools differ in which one they run",
        "state which block is run",
        (2.0, 2.0),
    )


def _differ(programs: Any, names: Sequence[str]) -> bool:
    first, last = programs.get("first block"), programs.get("last block")
    if not first or not last or first == last or not names:
        return False
    return all(re.search(rf"\b(?:def|class)\s+{re.escape(names[0])}\b", p) for p in (first, last))


def _finding(
    view: RunView,
    cases: Sequence[Sample],
    kind: str,
    message: str,
    advice: str,
    shares: tuple[float, float],
) -> Iterator[Finding]:
    """Yield a finding on programs, if there are cases.

    Args:
        view: The run.
        cases: Its samples with the defect.
        kind: The name of the finding.
        message: What is wrong.
        advice: What to do.
        shares: The shares of all samples from which it is high and medium.
    """
    if cases:
        yield Finding(
            kind=kind,
            area="answers",
            severity=severity_of(len(cases), view.num_done, high=shares[0], medium=shares[1]),
            count=len(cases),
            total=view.num_done,
            unit="samples",
            message=message,
            advice=advice,
            example=cases[0].text,
            problem_id=cases[0].problem_id,
            sample_index=cases[0].index,
        )
