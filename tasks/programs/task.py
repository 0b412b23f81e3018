"""What tasks share whose samples are programs, which are judged by running them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Final, Protocol

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.verdict import Verdict
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.programs.outcomes import ProgramOutcome
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.sandbox import Compare, Limits, Program, SandboxPool, TestCase


class ProgramCases(Protocol):
    """What the judge is given beside a program's source."""

    @property
    def tests(self) -> Sequence[TestCase]: ...

    @property
    def compare(self) -> Compare: ...

    def program(self, source: str) -> Program:
        """Return a program as the judge runs it."""
        ...


class ProgramTask(TextTask, ABC):
    """Programs in a sandbox. Sampling needs no permission; scoring runs the programs.

    limits: of each program.
    max_timeouts: after this many the other tests of a program fail without being run.
    all_tests: whether the tests after the first that fails are run as well.
    extract: how the program is found in a sample.
    cases_kept: problems whose tests are kept. Samples of one problem are judged at about the same
        time, so few are enough.
    """

    executes_code: Final = True
    limits: Limits
    max_timeouts = 1
    all_tests: ClassVar[bool] = False
    extract: str
    cases_kept: ClassVar[int] = 64

    def __init__(self) -> None:
        """Take the default options until `load` says otherwise."""
        self._kept = lru_cache(maxsize=self.cases_kept)(self.read_cases)

    @property
    def judged_by(self) -> str:
        """The name of the rule by which output counts as right: that of the headline's filter."""
        return self.filters[0]

    @abstractmethod
    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""

    @abstractmethod
    def read_cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a loaded problem; see `cases`."""

    @abstractmethod
    def verdicts(self, problem_id: str, outcome: ProgramOutcome) -> dict[str, ProgramVerdict]:
        """Return the verdict on a program by filter."""

    def cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a problem; the judge may run a reference solution to find them.

        Raises:
            SandboxError: that fails.
        """
        return self._kept(problem_id, judge)

    def forget_cases(self) -> None:
        """Read tests anew from now on."""
        self._kept.cache_clear()

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Refuse, because a program has to be run to be scored.

        Raises:
            InputError: always; use `judging`.
        """
        raise InputError(f"programs are scored by running them: with judging of {self.name}")
