"""What judging asks of a task whose samples are programs."""

from collections.abc import Sequence
from typing import Protocol

from treegen.tasks.apps.by_difficulty import ProgramVerdict
from treegen.tasks.apps.verdicts import Outcome
from treegen.tasks.judge import Compare, Judge, Limits, Program, Test


class ProgramCases(Protocol):
    """What the judge is given beside a program's source."""

    @property
    def tests(self) -> Sequence[Test]: ...

    @property
    def compare(self) -> Compare: ...

    def program(self, source: str) -> Program:
        """Return a program as the judge runs it."""
        ...


class JudgedTask(Protocol):
    """What judging asks of a task whose samples are programs."""

    @property
    def judged_by(self) -> str:
        """The name of the rule by which output counts as right."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of each program."""
        ...

    @property
    def max_timeouts(self) -> int:
        """After this many timeouts the other tests of a program fail without being run."""
        ...

    @property
    def all_tests(self) -> bool:
        """Whether the tests after the first that fails are run as well."""
        ...

    @property
    def extract(self) -> str:
        """How the program is found in a sample."""
        ...

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample's text."""
        ...

    def cases(self, problem_id: str, judge: Judge) -> ProgramCases:
        """Return the tests of a problem; the judge may run a reference solution to find them.

        Raises:
            JudgeError: that fails.
        """
        ...

    def verdicts(self, problem_id: str, outcome: Outcome) -> dict[str, ProgramVerdict]:
        """Return the verdict on a program by filter."""
        ...
