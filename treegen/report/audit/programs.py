"""Compares the programs of a run with those of other readers, and runs reference solutions."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from treegen.evals.job import Job
from treegen.evals.pipeline.listener import Listener
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.report.audit.equivalence import find_programs
from treegen.report.audit.findings import Finding, find
from treegen.report.view import RunView, Sample
from treegen.runs import RunDir, RunSettings

_MAX_SOLUTIONS: Final = 3  # solutions of a problem that are run


def audit_programs(view: RunView) -> Iterator[Finding]:
    """Yield the findings on the programs of a run; nothing is run.

    Only samples that failed are read again, because a program that passes its tests was found.
    """
    missed: list[Sample] = []
    broken: list[Sample] = []
    redefined: list[Sample] = []
    cache: dict[tuple[str, ...], dict[str, str | None] | None] = {}
    for problem in view.problems:
        names = re.findall(r"^\s*(?:def|class)\s+(\w{1,80})", problem.question, re.MULTILINE)[-1:]
        for sample in problem.samples:
            verdict = sample.verdict(view.headline)
            if verdict is None or verdict.correct:
                continue
            text = sample.parts[1]
            key = (text, *names)
            if key not in cache:
                cache[key] = find_programs(text, names)
            programs = cache[key] or {}
            best, outcome = programs.get("evalplus"), str(getattr(verdict, "outcome", ""))
            if verdict.answer is None and best:
                missed.append(sample)
            elif "compile" in outcome and best and sample.finish_reason != "length":
                broken.append(sample)
            elif _define_differently(programs, names):
                redefined.append(sample)
    for name, cases in (
        ("program-not-found", missed),
        ("program-does-not-compile", broken),
        ("several-programs", redefined),
    ):
        yield from find(name, cases, view.num_done)


def _define_differently(programs: Any, names: Sequence[str]) -> bool:
    """Return whether the first and the last block are different programs that define a name."""
    first, last = programs.get("first block"), programs.get("last block")
    if not first or not last or first == last or not names:
        return False
    return all(re.search(rf"\b(?:def|class)\s+{re.escape(names[0])}\b", p) for p in (first, last))


@runtime_checkable
class _SolvedTask(Protocol):
    """A task that knows solutions of its problems."""

    def solutions(self, problem_id: str) -> list[str]:
        """Return samples that are solutions of a problem."""


def list_solutions(job: Job) -> dict[str, list[str]]:
    """Return samples of each problem that its data call right; no problem without one."""
    task = job.task
    if not task.executes_code or not isinstance(task, _SolvedTask):
        return {}
    solutions = {
        problem.id: task.solutions(problem.id)[:_MAX_SOLUTIONS] for problem in job.data.problems
    }
    return {name: texts for name, texts in solutions.items() if texts}


def audit_solutions(
    job: Job, solutions: dict[str, list[str]], execution: ExecutionOptions
) -> Iterator[Finding]:
    """Yield a finding on problems whose scorer finds none of their solutions right.

    Args:
        job: The task and its problems.
        solutions: Their solutions, from `list_solutions`.
        execution: Permission to run them.

    Raises:
        TreegenError: programs cannot be run here.
    """
    records = [
        {"problem_id": name, "sample_index": index, "text": text}
        for name, texts in solutions.items()
        for index, text in enumerate(texts)
    ]
    settings = RunSettings(
        identity={}, problem_ids=list(solutions), planned=max(1, len(records)), free={}
    )
    right: set[str] = set()
    with (
        tempfile.TemporaryDirectory(prefix="treegen-solutions-") as folder,
        RunDir.create(Path(folder, "run"), settings) as run,
    ):
        for record in records:
            run.append(record)
        with closing(job.task.open_scoring(run, execution)) as program_scoring:
            program_scoring.prepare()
            for record in records:
                program_scoring.add(record)
            with Listener().poll_interrupts() as stop:
                for _ in program_scoring.finish(stop):
                    pass
            for record in records:
                verdict = (program_scoring.verdicts(record) or {}).get(job.task.filters[0])
                if verdict is None or verdict.correct:  # without a verdict, nothing is known
                    right.add(str(record["problem_id"]))
    questions = {problem.id: str(problem.content) for problem in job.data.problems}
    rejected = [name for name in solutions if name not in right]
    cases = [(name, f"{solutions[name][0]}: {questions[name]}") for name in rejected]
    yield from find("reference-rejected", cases, len(solutions), unit="problems")
