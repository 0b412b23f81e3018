"""Progress of a run, as its iterator yields it, with the accuracy so far and its interval."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from treegen.common.outputs import LevelRows, WorkerStatus
from treegen.evals.progress.time_left import TimeLeft
from treegen.evals.statistics.estimators import Estimate, estimate

# Seconds between updates of values that are too slow to compute in every step: intervals, and rows
# by level.
GLANCE: Final = 0.25


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run; an attempt begins whenever the run is started or resumed."""

    done: int
    """Number of finished samples, or searches."""
    planned: int
    """Number of samples, or searches, of the whole run."""
    rows: int
    """Rows being decoded now."""
    pages: int
    """Cache pages in use, out of num_pages."""
    num_pages: int
    tokens: int
    """Tokens decoded in this attempt; prompt tokens computed if nothing is decoded."""
    seconds: float
    """Time since the start of this attempt."""
    accuracy: float | None
    """Share of right samples so far; None if no sample is scored."""
    started: int = 0
    """Samples that were done at the start of this attempt."""
    estimate: Estimate | None = None
    """The accuracy as a mean over problems, with its interval, as of the last update."""
    levels: tuple[LevelRows, ...] = ()
    """The rows by level, as of the last update."""
    unit: str = "samples"
    """Name of the counted items."""
    unknown: int = 0
    """Searches that are still running. Solved searches end early, so running searches are harder on
    average than finished ones. The estimate leaves their results open."""
    workers: tuple[WorkerStatus, ...] = ()
    """The status of each worker of a cluster."""
    forecast: TimeLeft | None = None
    """The remaining time by the lengths so far; without it, it follows from the counts."""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second in this attempt."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds; None if nothing is known, as before the first sample."""
        if self.done >= self.planned:
            return 0.0
        if self.forecast is not None:
            return self.forecast.seconds
        new = self.done - self.started
        return self.seconds * (self.planned - self.done) / new if new > 0 else None

    @property
    def details(self) -> str:
        """Text about speed, rows, pages and accuracy, to show after the number of samples."""
        after = f", {self.format_accuracy}" if self.format_accuracy else ""
        if not self.num_pages:  # programs are running, and no model
            return f"{self.rows:,} programs running{after}"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {self.rows:,} rows, "
            f"{self.pages:,}/{self.num_pages:,} pages{after}"
        )

    @property
    def format_accuracy(self) -> str:
        """Text with the accuracy so far and its interval; "" if no sample is scored."""
        if (mean := self.estimate) is not None:
            least, more = ("at least ", f", {self.unknown:,} running") if self.unknown else ("", "")
            return f"accuracy {least}{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f}){more}"
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"

    @property
    def time_left(self) -> str:
        """A text like "1:02:03 left"; "" if the time is unknown or the run is finished."""
        if self.seconds_left is None or self.done >= self.planned:
            return ""
        minutes, rest = divmod(round(self.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
        most = "at most " if self.forecast is not None and self.forecast.is_bound else ""
        return f"{most}{clock} left"


class AccuracyCounter:
    """Counts right samples by problem as verdicts arrive."""

    def __init__(self) -> None:
        """Start without verdicts."""
        self._judged: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self.num_judged = self.num_right = 0

    def count(self, problem_id: str, right: bool) -> None:
        """Count a verdict.

        Args:
            problem_id: The problem of the sample.
            right: Whether the sample is right.
        """
        self._judged[problem_id] += 1
        self._right[problem_id] += right
        self.num_judged += 1
        self.num_right += right

    @property
    def accuracy(self) -> float | None:
        """The share of right samples; None before the first verdict."""
        return self.num_right / self.num_judged if self.num_judged else None

    def estimate(self, unknown: int = 0) -> Estimate | None:
        """Return the mean over problems with verdicts, with its interval; None before the first.

        Args:
            unknown: Number of started problems without a verdict. The value counts them as wrong.
                The interval extends from its low end with all of them wrong to its high end with
                all of them right.
        """
        values = [self._right[problem] / judged for problem, judged in self._judged.items()]
        if not values or not unknown:
            return estimate(values) if values else None
        worst, best = (estimate([*values, *[value] * unknown]) for value in (0.0, 1.0))
        return replace(worst, high=best.high)


class UpdateTimer:
    """Decides when to update values that are too slow to compute in every step."""

    def __init__(self) -> None:
        """Make the first update due at once."""
        self._due = 0.0

    def __call__(self, *, now: bool = False) -> bool:
        """Return whether an update is due.

        Args:
            now: Whether to make it due in any case.
        """
        if not now and time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + GLANCE
        return True
