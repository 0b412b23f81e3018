"""Tasks whose samples are programs: what running them needs, and what a run asks of a judge.

Such a task has two further members: `executes_code`, which is True, and `judging`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from treegen.errors import InputError
from treegen.evals.verdict import Verdict

if TYPE_CHECKING:
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.evals.statistics.estimators import Estimate
    from treegen.runs import RunDir

SANDBOXES: Final = ("auto", "bubblewrap", "landlock", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Permission to run model-written programs, for one command; it is never stored.

    sandbox: auto, bubblewrap, landlock, or none for no protection.
    num_workers: most programs at once; None is one per core.
    anew: judge samples again that have a verdict.
    """

    sandbox: str = "auto"
    num_workers: int | None = None
    anew: bool = False

    def __post_init__(self) -> None:
        if self.sandbox not in SANDBOXES:
            known = ", ".join(SANDBOXES)
            raise InputError(f"sandbox must be one of {known}, got {self.sandbox!r}")
        if self.num_workers is not None and self.num_workers < 1:
            raise InputError(f"num_workers must be at least 1, got {self.num_workers}")


class ProgramScoring(Protocol):
    """The verdicts on one run's samples: those stored, and those still to come."""

    def prepare(self) -> list[str]:
        """Start the judge; return lines to tell the user. Without permission, do nothing."""
        ...

    def add(self, record: Mapping[str, Any]) -> None:
        """Queue a stored sample to be judged; returns at once."""
        ...

    def poll(self) -> None:
        """Take the verdicts that have come, and start more programs."""
        ...

    def finish(self, stop: Callable[[], object]) -> "Iterator[RunProgress]":
        """Wait for the verdicts on all samples added; stop: polled as in `evals.run.sample`."""
        ...

    def verdicts(self, record: Mapping[str, Any]) -> Mapping[str, Verdict] | None:
        """Return the verdicts on a sample by filter; None if there are none yet."""
        ...

    @property
    def accuracy(self) -> float | None:
        """Share of right samples; None before the first verdict."""
        ...

    def estimate(self) -> "Estimate | None":
        """Return the accuracy as a mean over problems, with its interval."""
        ...

    @property
    def missing(self) -> int:
        """Samples added that have no verdict, those with judge errors included."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return how the samples were judged, as JSON holds it."""
        ...

    def close(self) -> None:
        """End every program; samples without a stored verdict are judged another time."""
        ...


@runtime_checkable
class CodeExecutionTask(Protocol):
    """A task whose samples can only be scored by running them."""

    @property
    def executes_code(self) -> bool: ...

    def judging(self, run: "RunDir", execution: ExecutionOptions | None) -> ProgramScoring:
        """Return the verdicts on a run of the task; without permission only the stored ones."""
        ...


def as_code_execution_task(task: object) -> CodeExecutionTask | None:
    """Return the task if its samples are programs."""
    return task if isinstance(task, CodeExecutionTask) and task.executes_code else None
