"""Turns the observations of a run into its verdict. Runs in the trusted process only."""

from __future__ import annotations

from typing import Any

from treegen.tasks.sandbox import value_json
from treegen.tasks.sandbox.limits import Limits
from treegen.tasks.sandbox.process import ProcessOutcome
from treegen.tasks.sandbox.programs import (
    Compare,
    Program,
    ProgramStatus,
    SandboxError,
    TestCase,
    TestResult,
)
from treegen.tasks.sandbox.signals import FROM_OUTSIDE, name_of

_DETAIL_CHARS = 300
_STAGES = 3


def decide(
    program: Program, test: TestCase, outcome: ProcessOutcome, limits: Limits, compare: Compare
) -> TestResult:
    """Return the verdict of one run; compare its output if it has one.

    Args:
        program: The program.
        test: The test case.
        outcome: What was observed of the run.
        limits: Limits of the run.
        compare: Returns whether an output is right.

    Raises:
        SandboxError: The comparer failed.
    """
    ended = outcome.ended
    report = outcome.report.decode("utf-8", "replace").split("\n")
    report += [""] * (_STAGES - len(report))  # a missing line counts as an empty one
    verdict, detail = _failure(outcome, report, limits)
    if verdict is None:
        verdict, detail = _answer(program, test, outcome, report, compare)
    return TestResult(
        verdict=verdict,
        seconds=ended["cpu"],
        wall_seconds=ended["wall"],
        memory=ended["memory"],
        detail=detail[:_DETAIL_CHARS],
    )


def _failure(
    outcome: ProcessOutcome, report: list[str], limits: Limits
) -> tuple[ProgramStatus | None, str]:
    """Return why the run gives no answer, or None. Limits come first: the helper measured them."""
    ended, status = outcome.ended, outcome.ended["status"]
    if outcome.overflow:
        return ProgramStatus.OUTPUT_LIMIT, f"more than {outcome.cap} bytes"
    if ended["killed"] == "files":
        return ProgramStatus.OUTPUT_LIMIT, "too much in the scratch directory"
    if ended["killed"] == "cpu" or ended["cpu"] > limits.cpu_seconds:
        return ProgramStatus.TIMEOUT, f"more than {limits.cpu_seconds:g} s of CPU time"
    if ended["killed"] == "wall":
        return ProgramStatus.TIMEOUT, f"more than {limits.wall:g} s of wall time"
    if report[0] != "ready":
        reason = report[0] or f"the child ended early with status {status}"
        return ProgramStatus.JUDGE_ERROR, reason
    if report[1] != "compiled" and -status in FROM_OUTSIDE:
        # No code of the program runs while it is compiled, so the program did not send the signal.
        return ProgramStatus.JUDGE_ERROR, f"the compiler was ended by {_name(status)}"
    if report[1] != "compiled":
        reason = report[1].removeprefix("compile_error ") or f"the compiler died: {_name(status)}"
        return ProgramStatus.COMPILE_ERROR, reason
    if status == 0:
        return None, ""
    lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
    detail = f"{_name(status)}: {lines[-1]}" if lines else _name(status)
    # A program killed near its memory limit had a failed allocation that Python could not report.
    full = status < 0 and ended["memory"] > 0.9 * limits.memory
    if "memory" in report[2:] or full:
        return ProgramStatus.MEMORY_LIMIT, detail
    return ProgramStatus.RUNTIME_ERROR, detail


def _answer(
    program: Program, test: TestCase, outcome: ProcessOutcome, report: list[str], compare: Compare
) -> tuple[ProgramStatus, str]:
    output: Any = outcome.stdout.decode("utf-8", "replace")
    if program.fn_name is not None:
        stage, _, text = report[2].partition(" ")
        if stage == "unreadable":
            return ProgramStatus.WRONG_ANSWER, f"returned a value that cannot be compared: {text}"
        if stage != "result":
            return ProgramStatus.RUNTIME_ERROR, f"ended before {program.fn_name} returned"
        try:
            output = value_json.loads(text)
        except ValueError as error:
            return ProgramStatus.WRONG_ANSWER, f"returned a value that cannot be read: {error}"
    try:
        accepted = bool(compare(output, test.expected))
    except Exception as error:
        raise SandboxError(
            f"the comparer failed: {type(error).__name__}: {error}; mend it, or take another"
        ) from error
    return (ProgramStatus.ACCEPTED, "") if accepted else (ProgramStatus.WRONG_ANSWER, "")


def _name(status: int) -> str:
    return f"exit status {status}" if status >= 0 else name_of(-status)
