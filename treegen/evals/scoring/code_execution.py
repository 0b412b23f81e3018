"""The scoring of samples that are programs, and the options for running the programs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from treegen.errors import InputError, arg
from treegen.evals.verdict import Verdict

if TYPE_CHECKING:
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.evals.statistics.estimators import Estimate

SANDBOXES: Final = ("auto", "bubblewrap", "landlock", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Permission to run model-written programs, for one command; it is never stored."""

    sandbox: str = "auto"
    """Auto, bubblewrap, landlock, or none for no protection."""
    num_workers: int | None = None
    """Maximum number of programs at once; None for one per core."""
    rescore: bool = False
    """Whether to score samples again that already have a verdict."""

    def __post_init__(self) -> None:
        if self.sandbox not in SANDBOXES:
            names = ", ".join(SANDBOXES)
            raise InputError(f"{arg('sandbox')} must be one of {names}, got {self.sandbox!r}")
        if self.num_workers is not None and self.num_workers < 1:
            raise InputError(f"{arg('num_workers')} must be at least 1, got {self.num_workers}")


class ProgramScoring(Protocol):
    """The verdicts on the samples of one run, stored or still to come from running programs."""

    num_judged: int
    """The number of added samples with a verdict."""

    def prepare(self) -> list[str]:
        """Start running programs; without permission, do nothing.

        Returns:
            Lines to show to the user.
        """

    def add(self, record: Mapping[str, Any]) -> None:
        """Queue a stored sample for scoring, without waiting."""

    def poll(self) -> None:
        """Collect the verdicts that have arrived, and start more programs."""

    def finish(self, stop: Callable[[], object]) -> "Iterator[RunProgress]":
        """Wait for the verdicts on all added samples.

        Args:
            stop: Polled repeatedly; once it returns a true value, the iteration ends.

        Yields:
            The progress.
        """

    def verdicts(self, record: Mapping[str, Any]) -> Mapping[str, Verdict] | None:
        """Return the verdicts on a sample by filter; None if it has none yet."""

    @property
    def accuracy(self) -> float | None:
        """The share of right samples; None before the first verdict."""

    def estimate(self) -> "Estimate | None":
        """Return the accuracy as a mean over problems, with its interval."""

    @property
    def missing(self) -> int:
        """The number of added samples without a verdict, including those with judge errors."""

    def summary(self) -> dict[str, Any]:
        """Return how the samples were scored, as an object for JSON."""

    def close(self) -> None:
        """End every program; samples without a stored verdict can be scored later."""
