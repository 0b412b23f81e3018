"""How far a run is: what its iterator yields, with the accuracy so far and its interval."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

from treegen.common.outputs import LevelRows, WorkerStatus
from treegen.evals.job import Job
from treegen.evals.statistics.estimators import Estimate, estimate
from treegen.evals.task_calls import score_record

# Seconds between two looks at what is too slow for every step: intervals, and rows by level.
GLANCE: Final = 0.25


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is.

    done, planned: samples, or searches.
    rows: rows that are decoded now.
    pages: cache pages in use, of num_pages.
    tokens: tokens decoded since this part began; prompt tokens computed if nothing is decoded.
    seconds: time since this part began.
    accuracy: share of right samples so far; None if none is judged.
    started: samples that were done when this part began.
    estimate: the accuracy as a mean over problems, with its interval, as of the last look.
    levels: the rows by level, as of the last look.
    unit: what is counted.
    unknown: searches under way. A search that is solved ends early, so those under way are more
    often hard ones than those that have ended. The estimate leaves open how they end.
    workers: what each worker of a cluster does.
    """

    done: int
    planned: int
    rows: int
    pages: int
    num_pages: int
    tokens: int
    seconds: float
    accuracy: float | None
    started: int = 0
    estimate: Estimate | None = None
    levels: tuple[LevelRows, ...] = ()
    unit: str = "samples"
    unknown: int = 0
    workers: tuple[WorkerStatus, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over the time of this part."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the pace of this part; None before its first sample."""
        new = self.done - self.started
        return self.seconds * (self.planned - self.done) / new if new > 0 else None

    @property
    def details(self) -> str:
        """What is to be told beside the number of samples."""
        after = f", {self.format_accuracy}" if self.format_accuracy else ""
        if not self.num_pages:  # no model is at work
            return f"{self.rows:,} programs under way{after}"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {self.rows:,} rows, "
            f"{self.pages:,}/{self.num_pages:,} pages{after}"
        )

    @property
    def format_accuracy(self) -> str:
        """The accuracy so far with its interval; "" if no sample is judged."""
        if (found := self.estimate) is not None:
            least, more = ("at least ", f", {self.unknown:,} unknown") if self.unknown else ("", "")
            return f"accuracy {least}{found.value:.3f} ({found.low:.3f} to {found.high:.3f}){more}"
        return "" if self.accuracy is None else f"accuracy {self.accuracy:.3f}"

    @property
    def time_left(self) -> str:
        """A text like "1:02:03 left"; "" if the time is not known or the run is over."""
        if self.seconds_left is None or self.done >= self.planned:
            return ""
        minutes, rest = divmod(round(self.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


class AccuracyCounter:
    """Counts right samples by problem while they come."""

    def __init__(self) -> None:
        """Nothing is judged yet."""
        self._judged: Counter[str] = Counter()
        self._right: Counter[str] = Counter()
        self.num_judged = self.num_right = 0

    def count(self, problem_id: str, right: bool) -> None:
        """Note a verdict."""
        self._judged[problem_id] += 1
        self._right[problem_id] += right
        self.num_judged += 1
        self.num_right += right

    @property
    def accuracy(self) -> float | None:
        """Share of right samples; None before the first."""
        return self.num_right / self.num_judged if self.num_judged else None

    def estimate(self, unknown: int = 0) -> Estimate | None:
        """Return the mean over the problems begun, with an interval; None before the first.

        Args:
            unknown: Problems begun that are not judged. The value then counts them as wrong. The
                interval reaches from its low end if all are wrong to its high end if all are right.
        """
        values = [self._right[problem] / judged for problem, judged in self._judged.items()]
        if not values or not unknown:
            return estimate(values) if values else None
        worst, best = (estimate([*values, *[each] * unknown]) for each in (0.0, 1.0))
        return replace(worst, high=best.high)


class UpdateTimer:
    """Says when it is time to look at what is too slow for every step."""

    def __init__(self) -> None:
        """The first look is due at once."""
        self._due = 0.0

    def __call__(self, *, now: bool = False) -> bool:
        """Return whether a look is due. now: it is due in any case."""
        if not now and time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + GLANCE
        return True


class ScoringAccuracyCounter(AccuracyCounter):
    """How many samples are right, by the task's first filter."""

    def __init__(self, job: Job) -> None:
        """Nothing is judged yet."""
        super().__init__()
        self._job = job
        self._problems = {problem.id: problem for problem in job.data.problems}

    def add(self, record: dict[str, Any]) -> str | None:
        """Judge a stored sample; returns its answer."""
        problem_id = record["problem_id"]
        verdicts = score_record(self._job.task, self._problems[problem_id], record)
        first = verdicts[self._job.task.filters[0]]
        self.count(problem_id, first.correct)
        return first.answer
