"""The forecast of a run's remaining time, against simulated runs whose end is known."""

import math

import numpy as np
import pytest

from treegen.evals.progress.run_progress import RunProgress, TimeForecast, TimeLeft
from treegen.evals.search.run import limit_forecast


def simulate(
    lengths: list[int], rows: int, longest: int, *, constant_step: bool
) -> tuple[list[tuple[float, TimeLeft | None, float | None]], float]:
    """Decode samples step by step; return moments with the forecast, and the time at the end.

    Each moment has the time, the forecast, and the time left by the number of finished samples.

    Args:
        lengths: The lengths of the samples.
        rows: How many samples are decoded at once.
        longest: The largest length of a sample.
        constant_step: Whether a step takes the same time with few rows, as on a GPU.
    """
    forecast = TimeForecast(longest, shares_speed=not constant_step)
    waiting, running = list(lengths), dict[int, int]()
    seconds, spent, done, steps = 0.0, 0, 0, 0
    moments: list[tuple[float, TimeLeft | None, float | None]] = []
    while waiting or running:
        while waiting and len(running) < rows:
            running[len(lengths) - len(waiting)] = 0
            waiting.pop(0)
        seconds += 0.05 if constant_step else 0.05 * len(running) / rows
        spent += len(running)
        for row in list(running):
            running[row] += 1
            if running[row] == lengths[row]:
                del running[row]
                forecast.finish(lengths[row])
                done += 1
        now = forecast.estimate(
            seconds=seconds, spent=spent, running=len(running), waiting=len(waiting)
        )
        steps += 1
        if steps % 8:
            continue
        by_count = seconds * (len(lengths) - done) / done if done else None
        moments.append((seconds, now, by_count))
    return moments, seconds


def draw_lengths(kind: str, num: int, longest: int) -> list[int]:
    generator = np.random.default_rng(7)
    if kind == "lognormal":
        values = generator.lognormal(5.0, 0.5, num)
    elif kind == "wide":
        values = generator.lognormal(4.5, 1.0, num)
    else:
        values = generator.normal(200.0, 15.0, num)
    return [int(value) for value in np.clip(values, 2, longest)]


@pytest.mark.parametrize("constant_step", [True, False])
@pytest.mark.parametrize(
    ("kind", "num", "rows"),
    [
        *((kind, 64, 64) for kind in ("lognormal", "wide", "alike")),
        ("lognormal", 256, 32),
        *(pytest.param(kind, 256, 32, marks=pytest.mark.soak) for kind in ("wide", "alike")),
    ],
)
def test_the_forecast_is_nearer_than_the_count_of_samples(
    kind: str, num: int, rows: int, constant_step: bool
) -> None:
    moments, end = simulate(draw_lengths(kind, num, 1024), rows, 1024, constant_step=constant_step)
    forecasts, counts = [], []
    for seconds, now, by_count in moments:
        left = end - seconds
        if now is None or now.is_bound or by_count is None or left < 0.1 * end:
            continue
        forecasts.append(abs(math.log(now.seconds / left)))
        counts.append(abs(math.log(by_count / left)))
    assert np.median(forecasts) < max(math.log(3), np.median(counts) / 2)
    assert max(forecasts) < max(math.log(16), max(counts) * 0.8)
    if max(counts) > math.log(20):
        assert np.median(forecasts) < np.median(counts)


def test_the_count_of_samples_is_wrong_by_far_where_they_start_together() -> None:
    moments, end = simulate(draw_lengths("alike", 64, 1024), 64, 1024, constant_step=True)
    first = next(moment for moment in moments if moment[2] is not None and moment[0] > 8.5)
    seconds, now, by_count = first
    assert now is not None and by_count is not None
    assert by_count > 10 * (end - seconds) and now.seconds < 6 * (end - seconds)


def test_before_the_first_end_it_is_a_bound() -> None:
    forecast = TimeForecast(100)
    now = forecast.estimate(seconds=10.0, spent=8 * 20, running=8, waiting=0)
    assert now == TimeLeft(40.0, is_bound=True)
    shown = RunProgress(0, 8, 8, 1, 9, 160, 10.0, None, forecast=now)
    assert shown.time_left == "at most 0:40 left" and shown.seconds_left == 40.0
    for seconds, spent, running in ((1.0, 5, 2), (0.0, 0, 8), (1.0, 9, 0)):
        other = TimeForecast(100 if running != 2 else None)
        assert other.estimate(seconds=seconds, spent=spent, running=running, waiting=0) is None


def test_no_forecast_exceeds_the_longest_sample() -> None:
    forecast = TimeForecast(256)
    forecast.finish(3)
    now = forecast.estimate(seconds=100.0, spent=16 * 200, running=15, waiting=0)
    assert now is not None and not now.is_bound
    speed = 16 * 200 / 100.0
    assert now.seconds <= 15 * 56 / speed + 1


def test_a_resumed_run_knows_the_lengths_of_before() -> None:
    forecast = TimeForecast(1000)
    for _ in range(100):
        forecast.finish(100, before=True)
    now = forecast.estimate(seconds=10.0, spent=8 * 50, running=8, waiting=0)
    assert now is not None and 5 < now.seconds < 30


def test_searches_take_at_most_the_time_of_their_budgets() -> None:
    far = TimeLeft(514.0)
    assert limit_forecast(far, 500, 60, 400.0) == TimeLeft(75.0, is_bound=True)
    assert limit_forecast(None, 500, 60, 400.0) == TimeLeft(75.0, is_bound=True)
    assert limit_forecast(TimeLeft(20.0), 500, 60, 400.0) == TimeLeft(20.0)
    for budget, speed in ((None, 400.0), (500, 0.0)):
        assert limit_forecast(far, budget, 60, speed) == far
        assert limit_forecast(None, budget, 60, speed) is None
