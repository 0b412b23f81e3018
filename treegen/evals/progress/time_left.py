"""A forecast of a run's remaining time from the lengths of its samples so far.

Samples that start together end together, so their number says little about the time that is left.
The forecast fits a log-normal distribution to the lengths of finished samples, and to those that
samples being decoded have reached without an end. The fit gives each of them a likely end. The
remaining tokens over the speed of the last seconds give the time.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

_WINDOW: Final = 30.0  # seconds over which the speed is measured
_REFRESH: Final = 0.25  # seconds between two fits
_GROUPS: Final = 8  # groups of equal ages in a fit
_LEAST_REST: Final = 0.1  # smallest expected further length, as a share of the length so far
_WAITING: Final = 32  # quantiles of which the mean length of a sample is made
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

    A length is a number of tokens. Searches, of which not all tokens are known, are measured in
    seconds instead.
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
                place = bisect_left(self._starts, self._clock - length)
                nearest = min(
                    (p for p in (place - 1, place) if 0 <= p < len(self._starts)),
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
            rest = waiting * self._longest + float(np.sum(self._longest - ages))
            return TimeLeft(rest / (speed * len(ages)), is_bound=True)
        mean, spread = self._fit(ages)
        rests = self._expect_rests(ages, mean, spread)
        shares = [(i + 0.5) / _WAITING for i in range(_WAITING)]
        whole = [self._length_at(share, mean, spread) for share in shares]
        work = (waiting * sum(whole) / _WAITING + sum(rests)) / (speed * len(rests))
        longest = max((*rests, whole[-1]) if waiting else rests) / speed
        return TimeLeft(work if self._shares_speed else max(work, longest))

    def _fit(self, ages: "np.ndarray") -> tuple[float, float]:
        """Return the likeliest mean and spread of the logarithms of lengths."""
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

    def _expect_rests(self, ages: "np.ndarray", mean: float, spread: float) -> list[float]:
        """Return the expected further lengths of samples: of n, each n-th quantile once."""
        num = len(ages)
        rests = []
        for place, age in enumerate(ages.tolist()):
            reached = _NORMAL.cdf((math.log(max(age, 1e-3)) - mean) / spread)
            order = (place * 7919) % num if num % 7919 else place  # not in the order of ages
            share = reached + (1 - reached) * (order + 0.5) / num
            # A sample far longer than all others is none of the fit; it may go on for a while.
            least = max(1.0, min(_LEAST_REST * age, self._longest - age))
            rests.append(max(self._length_at(share, mean, spread) - age, least))
        return rests

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
