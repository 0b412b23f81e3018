"""Progress of a run, as its iterator yields it, with the accuracy so far and its interval.

`TimeForecast` predicts the remaining time of a run from the lengths of its samples so far. Samples
that start together end together, so the number of finished samples says little about the remaining
time. The forecast fits a log-normal distribution to the lengths of finished samples and to the
present lengths of samples being decoded, which are lower bounds. The fit gives each sample being
decoded an expected length. The remaining time is the number of remaining tokens over the speed of
the last seconds.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Final

import numpy as np

from treegen.common.outputs import LevelRows, WorkerStatus
from treegen.evals.statistics.estimators import Estimate, estimate
from treegen.evals.statistics.metrics import Clusters, HasGroup, clusters_of

_WINDOW: Final = 30.0  # seconds over which the speed is measured
_REFRESH: Final = 0.25  # seconds between two fits
_GROUPS: Final = 8  # groups of equal ages in a fit
_MIN_REMAINING: Final = 0.1  # smallest expected further length, as a share of the length so far
_NUM_QUANTILES: Final = 32  # number of quantiles that give the mean length of a sample
_NORMAL: Final = NormalDist()
# The spread (standard deviation of the logarithm) is expected near 0.4, within a factor of 2.
_SPREADS: Final = np.geomspace(0.03, 1.6, 20)
_PRIOR: Final = -0.5 * ((np.log(_SPREADS) - math.log(0.4)) / math.log(2)) ** 2
_log_erfc: Final = np.vectorize(lambda x: math.log(max(math.erfc(x), 1e-300)), otypes=[float])


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """The remaining time of a run."""

    seconds: float
    """The forecast."""
    is_bound: bool = False
    """Whether no sample has ended yet, so that this is the longest time that it can take."""


class TimeForecast:
    """Forecasts the remaining time of samples that are decoded side by side.

    A length is a number of tokens. The lengths of searches are in seconds, because their numbers of
    tokens are not all known.
    """

    def __init__(self, longest: float | None = None, *, shares_speed: bool = False) -> None:
        """Start without a finished sample.

        Args:
            longest: The largest length that a sample can have; None if there is none.
            shares_speed: Whether few samples are decoded faster than many, as on a CPU. Otherwise a
                step takes as long with one sample as with all, and the longest sample decides.
        """
        self._shares_speed = shares_speed
        self._longest = math.inf if longest is None else float(longest)
        # Of the logarithms of finished lengths: their number, sum and sum of squares.
        self._num, self._sum, self._squares = 0, 0.0, 0.0
        self._new: list[float] = []  # lengths that ended since the last update
        # All samples grow by one for each unit of the clock. Starts are those of running samples.
        self._clock, self._spent = 0.0, 0.0
        self._starts: list[float] = []
        self._moments: deque[tuple[float, float]] = deque()
        self._last: tuple[float, TimeLeft | None] = -math.inf, None

    def finish(self, length: float, *, before: bool = False) -> None:
        """Count a finished sample.

        Args:
            length: Its length.
            before: Whether it ended in an earlier attempt of the run.
        """
        log = math.log(max(length, 1e-3))
        self._num += 1
        self._sum += log
        self._squares += log * log
        if not before:
            self._new.append(length)

    def estimate(
        self, *, seconds: float, spent: float, running: int, waiting: int
    ) -> TimeLeft | None:
        """Return the time left; None if it is unknown.

        Args:
            seconds: Time since the start of this attempt.
            spent: The sum of lengths so far in this attempt.
            running: The number of samples being decoded.
            waiting: The number of samples that have not begun.
        """
        self._update(spent, running)
        if seconds - self._last[0] < _REFRESH:
            return self._last[1]
        speed = self._measure_speed(seconds)
        now = self._forecast(speed, waiting) if speed > 0 and running > 0 else None
        self._last = seconds, now
        return now

    def _update(self, spent: float, running: int) -> None:
        """Move the clock, forget finished samples, and note those that began."""
        began = self._clock
        self._clock += (spent - self._spent) / max(1, len(self._starts), running)
        self._spent = spent
        for length in self._new:
            if self._starts:  # the one that began nearest to when this sample did
                index = bisect_left(self._starts, self._clock - length)
                nearest = min(
                    (p for p in (index - 1, index) if 0 <= p < len(self._starts)),
                    key=lambda p: abs(self._starts[p] - self._clock + length),
                )
                del self._starts[nearest]
        self._new.clear()
        del self._starts[running:]  # preempted
        self._starts += [began] * (running - len(self._starts))

    def _forecast(self, speed: float, waiting: int) -> TimeLeft | None:
        """Return the time left.

        Args:
            speed: Growth of each running sample per second.
            waiting: Number of samples that have not started.
        """
        ages = np.clip(self._clock - np.array(self._starts), 0.0, self._longest)
        if not self._num:
            if math.isinf(self._longest):
                return None
            total = waiting * self._longest + float(np.sum(self._longest - ages))
            return TimeLeft(total / (speed * len(ages)), is_bound=True)
        mean, spread = self._fit(ages)
        remaining = self._expect_remaining(ages, mean, spread)
        shares = [(i + 0.5) / _NUM_QUANTILES for i in range(_NUM_QUANTILES)]
        lengths = [self._length_at(share, mean, spread) for share in shares]
        total = waiting * sum(lengths) / _NUM_QUANTILES + sum(remaining)
        work = total / (speed * len(remaining))
        longest = max((*remaining, lengths[-1]) if waiting else remaining) / speed
        return TimeLeft(work if self._shares_speed else max(work, longest))

    def _fit(self, ages: "np.ndarray") -> tuple[float, float]:
        """Return the most likely mean and spread of the logarithms of lengths."""
        log_ages = np.log(np.maximum(np.sort(ages), 1e-3))
        groups = [part for part in np.array_split(log_ages, _GROUPS) if len(part)]
        middle = self._sum / self._num
        top = max(middle, float(log_ages.max()))
        means = np.linspace(middle - 0.5, top + 2.5, 48)[:, None]
        quadratic = self._squares - 2 * means * self._sum + self._num * means**2
        likelihood = _PRIOR - self._num * np.log(_SPREADS) - quadratic / (2 * _SPREADS**2)
        for group in groups:
            z = (float(group.mean()) - means) / (_SPREADS * math.sqrt(2))
            likelihood = likelihood + len(group) * _log_erfc(z)
        row, column = np.unravel_index(int(np.argmax(likelihood)), likelihood.shape)
        return float(means[row, 0]), float(_SPREADS[column])

    def _length_at(self, share: float, mean: float, spread: float) -> float:
        """Return the length below which a share of the samples is."""
        z = _NORMAL.inv_cdf(min(max(share, 1e-9), 1 - 1e-9))
        return min(math.exp(mean + spread * z), self._longest)

    def _expect_remaining(self, ages: "np.ndarray", mean: float, spread: float) -> list[float]:
        """Return a likely remaining length of each of n samples.

        Each is a quantile of the sample's own distribution: another one of n evenly spaced
        quantiles for each sample, so that their lengths spread as real lengths do.
        """
        num = len(ages)
        remaining = []
        for index, age in enumerate(ages.tolist()):
            reached = _NORMAL.cdf((math.log(max(age, 1e-3)) - mean) / spread)
            order = (index * 7919) % num if num % 7919 else index  # not in the order of ages
            share = reached + (1 - reached) * (order + 0.5) / num
            # A sample far longer than all others does not fit the distribution; it may go on.
            min_rest = max(1.0, min(_MIN_REMAINING * age, self._longest - age))
            remaining.append(max(self._length_at(share, mean, spread) - age, min_rest))
        return remaining

    def _measure_speed(self, seconds: float) -> float:
        """Return the clock's units per second over the last seconds, or all if they are few."""
        moments = self._moments
        if not moments or seconds - moments[-1][0] >= _WINDOW / 30:
            moments.append((seconds, self._clock))
            while len(moments) > 2 and seconds - moments[1][0] >= _WINDOW:
                moments.popleft()
        since, before = moments[0]
        if seconds - since < 1.0:
            return self._clock / seconds if seconds > 0 else 0.0
        return (self._clock - before) / (seconds - since)


# Seconds between updates of values that are too slow to compute in every step: intervals, and rows
# by level.
UPDATE_SECONDS: Final = 0.25


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
    """Share of right samples among those with a verdict; None if no sample has one."""
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
    scored: int | None = None
    """Number of samples with a verdict; None if no sample is scored, or if all finished ones are.
    Programs run after their samples end."""
    compute_estimate: Callable[[], Estimate | None] | None = field(
        default=None, repr=False, compare=False
    )
    """Computes `estimate` of all verdicts so far. Valid until the next step of the run. None if
    `estimate` is up to date."""

    def update_estimate(self) -> "RunProgress":
        """Return the progress with the estimate of all verdicts so far, before the next step."""
        if self.compute_estimate is None:
            return self
        return replace(self, estimate=self.compute_estimate(), compute_estimate=None)

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
        after = f", {self.accuracy_text}" if self.accuracy_text else ""
        if not self.num_pages:  # programs are running, and no model
            return f"{self.rows:,} programs running{after}"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, {self.rows:,} rows, "
            f"{self.pages:,}/{self.num_pages:,} pages{after}"
        )

    @property
    def accuracy_text(self) -> str:
        """Text with the accuracy so far and its interval; "" if no sample is scored.

        For searches it is the share of solved problems, in which running searches are not solved
        yet.
        """
        name = "solved so far" if self.unit == "searches" else "accuracy"
        is_partial = self.scored is not None and self.scored < self.done
        of_scored = f" of {self.scored:,} scored {self.unit}" if is_partial else ""
        if (mean := self.estimate) is not None:
            more = f", {self.unknown:,} running" if self.unknown else ""
            return f"{name} {mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f}){of_scored}{more}"
        return "" if self.accuracy is None else f"{name} {self.accuracy:.3f}{of_scored}"

    @property
    def time_left(self) -> str:
        """A text like "1:02:03 left"; "" if the time is unknown or the run is finished."""
        if self.seconds_left is None or self.done >= self.planned:
            return ""
        minutes, seconds = divmod(round(self.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        prefix = "at most " if self.forecast is not None and self.forecast.is_bound else ""
        return f"{prefix}{clock} left"


class AccuracyCounter:
    """Counts right samples by problem as verdicts arrive."""

    def __init__(self, problems: Iterable[HasGroup] = ()) -> None:
        """Start without verdicts.

        Args:
            problems: The problems, for an interval clustered by their groups; empty for none.
        """
        self._problems = [problem for problem in problems if problem.group]
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
        clusters: Clusters = clusters_of(self._problems, list(self._judged))
        if not values or not unknown:
            return estimate(values, clusters) if values else None
        if clusters is not None:  # which problems are unknown is not stored
            clusters = [*clusters, *range(unknown)]
        worst, best = (estimate([*values, *[value] * unknown], clusters) for value in (0.0, 1.0))
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
        self._due = time.monotonic() + UPDATE_SECONDS
        return True
