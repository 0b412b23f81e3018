"""Power by the formula against simulated runs, and variances without the noise of samples."""

import math

import numpy as np
import pytest
from cli_cases import Command
from report_cases import make_run
from scipy import stats

from treegen.errors import InputError
from treegen.evals.statistics.estimators import adjusted_rows
from treegen.evals.statistics.power import (
    Variances,
    correlation_of,
    difference_for,
    estimate_variances,
    power,
    problems_for,
)
from treegen.report.compare import _difference


def _p_value(differences: list[float]) -> float:
    found = _difference("accuracy", "strict", [0.0] * len(differences), differences).p_value
    assert found is not None
    return found


def _rights(chances: np.ndarray, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(int(right), num) for right in rng.binomial(num, chances)]


@pytest.mark.parametrize(
    ("num", "num_samples", "difference"),
    [(7, 1, 0.5), (7, 64, 0.3), (20, 1, 0.35), (30, 8, 0.15), (80, 4, 0.06), (300, 1, 0.1)],
)
def test_power_is_how_often_compare_finds_a_difference(
    num: int, num_samples: int, difference: float
) -> None:
    """Of runs whose chances are made in another way than `power` makes them."""
    rng = np.random.default_rng(0)
    tries = 1000
    first = rng.beta(3, 3, (tries, num))
    second = np.clip(first + difference + rng.normal(0, 0.1, first.shape), 0, 1)
    difference = float((second - first).mean())
    rows = (rng.binomial(num_samples, second) - rng.binomial(num_samples, first)) / num_samples
    found = np.mean([_p_value(row) < 0.05 for row in rows.tolist()])
    within = float((first * (1 - first) + second * (1 - second)).mean()) / 2
    between = float(first.var() + second.var()) / 2
    correlation = 1 - float((second - first).var()) / (2 * between)
    spread = Variances(between=between, within=within, correlation=correlation)
    expected = power(spread, difference, num, num_samples)
    assert found == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize("shift", [0.4, 0.8, 1.6])
def test_the_planned_power_is_reached(shift: float, num_samples: int) -> None:
    """With chances whose logarithms of odds are normal, where `power` has Beta ones."""
    rng = np.random.default_rng(5)

    def chances(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        z, other = rng.standard_normal((2, *shape))
        second = 0.8 * z + 0.6 * other + shift
        return 1 / (1 + np.exp(0.5 - 1.5 * z)), 1 / (1 + np.exp(0.5 - 1.5 * second))

    a, b = chances((200_000,))
    spread = Variances(
        between=float(a.var() + b.var()) / 2,
        within=float((a * (1 - a) + b * (1 - b)).mean()) / 2,
        correlation=float(np.corrcoef(a, b)[0, 1]),
    )
    num = problems_for(spread, float((b - a).mean()), num_samples)
    a, b = chances((1000, num))
    rows = (rng.binomial(num_samples, b) - rng.binomial(num_samples, a)) / num_samples
    center, error, freedom = adjusted_rows(rows)
    found = float((abs(center / error) > stats.t.ppf(0.975, freedom)).mean())
    assert 0.75 <= found <= 0.88  # with few problems, one more adds some hundredths


def test_few_problems_show_nothing() -> None:
    """Where the plain paired t-test would promise much."""
    spread = Variances(between=0.0, within=0.0, correlation=0.0)
    assert power(spread, 0.5, 2, 1) == 0 and difference_for(spread, 2, 1) is None
    assert power(spread, 0.1, 10, 1) == 0 and 20 < problems_for(spread, 0.1, 1) < 40


def test_variances_of_a_run_are_without_bias() -> None:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(300):
        chances = rng.beta(2, 2, 40)
        found.append(estimate_variances(_rights(chances, 3, rng)))
    between, within = np.mean(found, axis=0)
    assert between == pytest.approx(0.05, abs=0.003)  # of Beta(2, 2)
    assert within == pytest.approx(0.2, abs=0.003)
    # A correlation is a ratio, so it is right in large runs only.
    first, noise = rng.beta(2, 2, (2, 4000))
    second = (first + noise) / 2
    found_now = correlation_of(_rights(first, 4, rng), _rights(second, 9, rng))
    assert found_now == pytest.approx(math.sqrt(0.5), abs=0.05)


def test_the_fewest_problems_and_the_least_difference() -> None:
    spread = Variances(between=0.08, within=0.12, correlation=0.6)
    for k in (1, 8, 64):
        num = problems_for(spread, 0.03, k)
        assert power(spread, 0.03, num, k) >= 0.8 > power(spread, 0.03, num - 1, k)
        assert difference_for(spread, num, k) == pytest.approx(0.03, rel=0.01)
    assert problems_for(spread, 0.03, 64) < problems_for(spread, 0.03, 1)
    # The normal formula, which is right for many problems.
    variance = 2 * 0.4 * 0.08 + 2 * 0.12
    normal = variance * (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 / 0.01**2
    assert problems_for(spread, 0.01, 1) == pytest.approx(normal, rel=0.001)
    nothing = Variances(between=0.0, within=0.0, correlation=0.0)
    assert power(nothing, 0.5, 50, 1) == 1.0
    assert power(spread, 0.99, 10**6, 64) == 1.0


def test_what_has_no_power() -> None:
    spread = Variances(between=0.1, within=0.1, correlation=0.5)
    for wrong in (
        lambda: power(spread, 0.0, 10, 1),
        lambda: power(spread, 0.1, 1, 1),
        lambda: power(spread, 0.1, 10, 0),
        lambda: power(spread, 0.1, 10, 1, alpha=0),
        lambda: problems_for(spread, 0.1, 1, wanted=0.01),
        lambda: problems_for(spread, 1e-9, 1),
        lambda: difference_for(spread, 10, 1, wanted=1.0),
        lambda: Variances(between=0.3, within=0.1, correlation=0.5),
        lambda: Variances(between=0.1, within=0.1, correlation=2),
        lambda: estimate_variances([(1, 2)]),
        lambda: estimate_variances([(1, 1), (0, 1)]),
    ):
        with pytest.raises(InputError):
            wrong()


def test_the_command_takes_variances_from_runs(tmp_path: object, treegen: Command) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    a, b = (make_run(tmp_path / name, num_problems=20, seed=i) for i, name in enumerate("ab"))
    one = treegen("power", "--run", a, "--n-problems", "20", "--n-samples", "1,8")
    assert one.code == 0 and "Problems for 0.02" in one.out
    assert [row["num_samples"] for row in one.document["rows"]] == [1, 8]
    assert one.document["correlation"] == 0.5
    two = treegen("power", "--run", a, "--run", b, "--difference", "0.1").document
    assert two["correlation"] > 0.5  # both are right about as often as a problem is easy
    assert treegen("power", "--run", a, "--between", "0.2").document["between"] == 0.2
    assert "--run must be one or two runs, got 3" in treegen("power", *["--run", a] * 3).error
    assert "power" in treegen("power", "--power", "0.01").error
    assert "integers" in treegen("power", "--n-samples", "x").error
