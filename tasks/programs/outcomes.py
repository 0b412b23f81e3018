"""Outcomes of programs, as run directories store them and as reports read them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from treegen.tasks.programs.report import NO_PROGRAM, ProgramVerdict
from treegen.tasks.sandbox import ProgramStatus, TestResult

_LETTERS: Final = {
    ProgramStatus.ACCEPTED: "A",
    ProgramStatus.WRONG_ANSWER: "W",
    ProgramStatus.RUNTIME_ERROR: "R",
    ProgramStatus.COMPILE_ERROR: "C",
    ProgramStatus.TIMEOUT: "T",
    ProgramStatus.MEMORY_LIMIT: "M",
    ProgramStatus.OUTPUT_LIMIT: "O",
}
_NOT_RUN: Final = "-"
_VERDICTS: Final = {letter: verdict for verdict, letter in _LETTERS.items()}


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The outcome of one program."""

    program: str | None
    """Its short hash; None if the sample has no program."""
    verdict: str
    """Accepted, or its first kind of failure."""
    tests: str
    """A letter for each test, A for accepted."""
    seconds: float = 0.0
    """CPU seconds of its longest test."""
    detail: str = ""
    """One line on the first failure."""
    sandbox: str = ""
    """The tier of the sandbox that it ran in."""

    @property
    def verdicts(self) -> ProgramVerdict:
        """The verdict for reports."""
        credit = self.tests.count(_LETTERS[ProgramStatus.ACCEPTED]) / max(1, len(self.tests))
        correct = self.verdict == ProgramStatus.ACCEPTED
        return ProgramVerdict(self.program, correct, credit, self.verdict)

    def first(self, num_tests: int) -> ProgramVerdict:
        """Return the verdict by the first `num_tests` tests alone."""
        accepted = _LETTERS[ProgramStatus.ACCEPTED]
        failed = next((status for status in self.tests[:num_tests] if status != accepted), None)
        verdict = self.verdict if failed else str(ProgramStatus.ACCEPTED)
        if self.program is None:
            verdict = NO_PROGRAM
        elif failed in _VERDICTS:
            verdict = str(_VERDICTS[failed])
        correct = verdict == ProgramStatus.ACCEPTED
        return ProgramVerdict(self.program, correct, outcome=verdict)


def program_hash(program: str) -> str:
    """Return the short hash that identifies a program."""
    data = program.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


NO_OUTCOME: Final = ProgramOutcome(None, NO_PROGRAM, "")


def outcome_of(
    program: str, results: Sequence[TestResult], num_tests: int, sandbox: str
) -> ProgramOutcome:
    """Return the outcome of a program's results. Tests that did not run count as failed.

    Args:
        program: Short hash of the program.
        results: Results of its tests, in their order.
        num_tests: Number of tests of the problem.
        sandbox: Tier of the sandbox.
    """
    failed = next((test for test in results if test.verdict is not ProgramStatus.ACCEPTED), None)
    letters = "".join(_LETTERS[test.verdict] for test in results)
    return ProgramOutcome(
        program=program,
        verdict=str(failed.verdict if failed else ProgramStatus.ACCEPTED),
        tests=letters.ljust(num_tests, _NOT_RUN),
        seconds=round(max(test.seconds for test in results), 3),
        detail=failed.detail if failed else "",
        sandbox=sandbox,
    )
