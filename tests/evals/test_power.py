"""Power by the formula against simulated runs, and variances without the noise of samples."""

import math
from pathlib import Path

import numpy as np
import pytest
from cli_cases import Command, Done
from report_cases import make_run
from scipy import stats

from treegen.errors import InputError
from treegen.evals.statistics.estimators import adjusted_rows, estimate
from treegen.evals.statistics.power import (
    Variances,
    correlation_of,
    difference_for,
    estimate_variances,
    limit_variances,
    power,
    predict_half_width,
    problems_for,
    problems_for_half_width,
)
from treegen.report.compare import _compute_difference


def _p_value(differences: list[float]) -> float:
    found = _compute_difference("accuracy", "strict", [0.0] * len(differences), differences).p_value
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


@pytest.mark.parametrize("num", [40, 60])
def test_a_difference_limits_the_correlation(num: int) -> None:
    """Of runs that find the same problems hard: their correlation cannot be higher.

    The smaller power is the same as if the limit itself were given, below and above 50 problems.
    """
    rng = np.random.default_rng(2)
    ranks = rng.random((1000, num))
    first, second = (stats.beta.ppf(ranks, 0.3 * m, 0.3 * (1 - m)) for m in (0.45, 0.55))
    found_correlation = float(np.corrcoef(first.ravel(), second.ravel())[0, 1])
    between = float(first.var() + second.var()) / 2
    within = float((first * (1 - first) + second * (1 - second)).mean()) / 2
    spread = Variances(between=between, within=within, correlation=1.0)
    limited = limit_variances(spread, 0.1)
    assert limited.correlation == pytest.approx(found_correlation, abs=0.01)
    assert limited.between == between and limited.within == pytest.approx(within, abs=0.001)
    rows = (rng.binomial(8, second) - rng.binomial(8, first)) / 8
    center, error, freedom = adjusted_rows(rows)
    found = float((abs(center / error) > stats.t.ppf(0.975, freedom)).mean())
    expected = power(spread, 0.1, num, 8)
    assert expected == power(limited, 0.1, num, 8) == pytest.approx(found, abs=0.05)


def test_a_difference_limits_the_variances() -> None:
    """Accuracies of 0.2 and 0.8 allow a total variance of 0.16."""
    spread = Variances(between=0.19, within=0.05, correlation=0.0)
    limited = limit_variances(spread, 0.6)
    assert limited.between == pytest.approx(0.16) and limited.within == pytest.approx(0)
    assert limit_variances(spread, -0.6) == limited == limit_variances(limited, 0.6)
    assert limit_variances(spread, 0.01) == spread
    assert limit_variances(spread, 1.0).between == 0


@pytest.mark.parametrize(
    ("a", "b", "num", "num_samples"),
    [(2, 2, 10, 1), (2, 2, 40, 8), (0.3, 0.1, 40, 4), (1, 9, 300, 2), (0.1, 3, 20, 64)],
)
def test_the_half_width_is_that_of_simulated_runs(
    a: float, b: float, num: int, num_samples: int
) -> None:
    rng = np.random.default_rng(3)
    mean = a / (a + b)
    between = mean * (1 - mean) / (a + b + 1)
    within = mean * (1 - mean) - between
    spread = Variances(between=between, within=within, correlation=0.0)
    reaches = []
    for chances in rng.beta(a, b, (500, num)):
        found = estimate((rng.binomial(num_samples, chances) / num_samples).tolist())
        reaches.append(max(found.value - found.low, found.high - found.value))
    half_width = predict_half_width(spread, mean, num, num_samples)
    # The farther end varies with the mean, which matters if the mean is uncertain.
    tolerance = 0.05 if num > 10 else 0.1
    assert float(np.mean(reaches)) == pytest.approx(half_width, rel=tolerance)
    needed = problems_for_half_width(spread, mean, num_samples, half_width)
    assert needed == num
    assert predict_half_width(spread, mean, num - 1, num_samples) > half_width


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
        lambda: power(spread, 1.5, 10, 1),
        lambda: power(spread, 0.1, 10**400, 1),
        lambda: problems_for(spread, 0.0, 1),
        lambda: problems_for(spread, math.nan, 1),
        lambda: problems_for(spread, 0.1, 0),
        lambda: problems_for(spread, 0.1, 1, alpha=0),
        lambda: problems_for(spread, 0.1, 1, wanted=0.01),
        lambda: problems_for(spread, 1e-9, 1),
        lambda: difference_for(spread, 10, 1, wanted=1.0),
        lambda: problems_for_half_width(spread, 0.5, 1, 0.0),
        lambda: problems_for_half_width(spread, 0.5, 1, 1e-9),
        lambda: problems_for_half_width(spread, 0.5, 0, 0.1),
        lambda: Variances(between=0.3, within=0.1, correlation=0.5),
        lambda: Variances(between=0.1, within=0.1, correlation=2),
        lambda: estimate_variances([(1, 2)]),
        lambda: estimate_variances([(1, 1), (0, 1)]),
    ):
        with pytest.raises(InputError):
            wrong()


def test_the_command_takes_variances_from_runs(tmp_path: Path, treegen: Command) -> None:
    a, b = (make_run(tmp_path / name, num_problems=20, seed=i) for i, name in enumerate("ab"))
    one = treegen("power", "--run", a, "--n-problems", "20", "--n-samples", "1,8")
    assert one.code == 0 and "Problems for 0.02" in one.out
    assert [row["num_samples"] for row in one.document["rows"]] == [1, 8]
    assert one.document["correlation"] == 0.5
    two = treegen("power", "--run", a, "--run", b, "--difference", "0.1").document
    assert two["correlation"] > 0.5  # both are right about as often as a problem is easy
    assert (one.document["assumed"], two["assumed"]) == (["correlation"], [])
    assert treegen("power", "--run", a, "--between", "0.2").document["between"] == 0.2
    assert "--run must be one or two runs, got 3" in treegen("power", *["--run", a] * 3).error
    assert "power" in treegen("power", "--power", "0.01").error
    assert "integers" in treegen("power", "--n-samples", "x").error


@pytest.mark.parametrize("command", [("power", "--run"), ("replay",)])
def test_a_run_without_samples_is_to_be_finished(
    tmp_path: Path, treegen: Command, command: tuple[str, ...]
) -> None:
    run = make_run(tmp_path / "run", num_problems=3, seed=0)
    (run / "samples.jsonl").write_bytes(b"")
    assert f"{run} has no finished samples; finish the run" in treegen(*command, run).error


def test_the_command_says_what_is_assumed_or_rough(tmp_path: Path, treegen: Command) -> None:
    a, b = (make_run(tmp_path / name, num_problems=20, seed=i) for i, name in enumerate("ab"))
    plain = treegen("power", "-n", "8", "--within", "0.1").out
    assert "between problems 0.1000 (assumed), within 0.1000, correlation" in plain
    assert "rough" not in plain
    one = treegen("power", "-n", "8", "--run", a)
    assert "correlation of the runs 0.50 (assumed; two --run estimate it)" in one.out
    assert "the variances are estimated from only 20 problems" in one.out
    assert "With correlation" not in one.out
    two = treegen("power", "-n", "8", "--run", a, "--run", b)
    assert "the variances and the correlation are estimated from only 20 problems" in two.out
    assert "assumed" not in two.out and "With correlation 0.50" in two.out
    (row,), (default,) = (done.document["rows"] for done in (two, _with_correlation(treegen, a, b)))
    assert row["problems_needed_by_default"] == default["problems_needed"]
    assert "problems_needed_by_default" not in default
    given = treegen("power", "-n", "8", "--run", a, "--between", "0.1", "--within", "0.1").out
    assert "rough" not in given and "(assumed;" in given
    wide = make_run(tmp_path / "wide", num_problems=50)
    assert "rough" not in treegen("power", "-n", "8", "--run", wide).out
    narrow = treegen("power", "--half-width", "0.1", "-n", "8", "--run", a)
    assert "rough" in narrow.out and narrow.document["assumed"] == []


def _with_correlation(treegen: Command, a: Path, b: Path) -> Done:
    return treegen("power", "-n", "8", "--run", a, "--run", b, "--correlation", "0.5")


@pytest.mark.parametrize(("num_problems", "low", "high"), [(10, -0.26, 1.0), (50, 0.21, 0.75)])
def test_few_problems_give_rough_correlations(num_problems: int, low: float, high: float) -> None:
    rng, estimates = np.random.default_rng(1), []
    factor = 2 * math.sin(math.pi * 0.5 / 6)
    for _ in range(400):
        normal = rng.multivariate_normal([0, 0], [[1, factor], [factor, 1]], size=num_problems)
        chances = stats.beta.ppf(stats.norm.cdf(normal), 0.75, 0.75)  # variance 0.1
        a, b = ([(int(x), 8) for x in rng.binomial(8, column)] for column in chances.T)
        estimates.append(correlation_of(a, b))
    assert np.quantile(estimates, [0.025, 0.975]) == pytest.approx([low, high], abs=0.1)


def test_the_command_says_what_a_difference_excludes(treegen: Command) -> None:
    words = ("power", "--between", "0.19", "--within", "0.055", "--correlation", "0.9", "-n", "8")
    done = treegen(*words, "--difference", "0.3", "--n-problems", "12")
    assert "correlation of the runs 0.90\n" in done.out
    found = done.document["rows"][0]["difference_found"]
    for difference in ("0.3", f"{found:.4g}"):
        assert f"a difference of {difference} allows a variance" in done.out
    wanted, largest = done.document["limits"]
    assert (wanted["difference"], largest["difference"]) == (0.3, found)
    assert f"a correlation of the runs of at most {wanted['correlation']:.3g}; the" in done.out
    assert wanted["correlation"] < 0.7 and wanted["between"] == 0.19
    plain = treegen("power", "-n", "8")
    assert "allows" not in plain.out and plain.document["limits"][0]["correlation"] == 0.5


def test_the_command_gives_the_half_width_of_one_run(tmp_path: Path, treegen: Command) -> None:
    run = make_run(tmp_path / "a", num_problems=20)
    shown = treegen("show", run).document
    row = shown["report"]["metrics"][0]
    done = treegen("power", "--half-width", "0.05", "--run", run)
    assert "Problems for +-0.05" in done.out and "Half width with 20" in done.out
    document = done.document
    assert document["accuracy"] == pytest.approx(row["value"])
    own = [r for r in document["rows"] if r["num_samples"] == 8]
    reach = max(row["value"] - row["low"], row["high"] - row["value"])
    assert own[0]["half_width"] == pytest.approx(reach, abs=1e-6)
    assert document["rows"][0]["problems_needed"] >= document["rows"][-1]["problems_needed"] > 20
    assert "difference" not in document and "limits" not in document
    assumed = treegen("power", "--half-width", "0.05", "-n", "1")
    assert assumed.document["accuracy"] == pytest.approx(0.276, abs=0.001)
    assert "Half width with" not in assumed.out
    assert "accuracy 0.276 (from the variances), variance" in assumed.out
    assert "from the variances" not in done.out
    for flag in ("--difference", "--correlation", "--power", "--alpha"):
        refused = treegen("power", "--half-width", "0.05", flag, "0.5")
        assert f"{flag} has no effect with --half-width" in refused.error
    assert "at most one run" in treegen("power", "--half-width", "0.1", *["--run", run] * 2).error
    assert "above 0 and below 1" in treegen("power", "--half-width", "0").error
    for number in ("0", "1" + "0" * 400):
        refused = treegen("power", "--half-width", "0.1", "--n-problems", number)
        assert "at least 1 and at most 100,000,000" in refused.error


def test_given_variances_suffice_for_one_sample(tmp_path: object, treegen: Command) -> None:
    """The error about such a run names these options."""
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    run = make_run(tmp_path / "a", num_problems=8, num_samples=1)
    assert "--between and --within" in treegen("power", "--run", run).error
    given = ("--between", "0.1", "--within", "0.1")
    assert treegen("power", "--run", run, *given).document["num_problems"] == 8
    assert treegen("power", "--run", run, *given, "--half-width", "0.1").code == 0


def test_problems_with_one_sample_of_an_unfinished_run_are_left_out(
    tmp_path: Path, treegen: Command
) -> None:
    whole = make_run(tmp_path / "whole", num_problems=6)
    part = make_run(tmp_path / "part", num_problems=8, done=[8] * 6 + [1, 0])
    names = ("between", "within", "num_estimated_from")
    documents = [treegen("power", "--run", run).document for run in (whole, part)]
    assert [[document[name] for name in names] for document in documents] == [
        [documents[0][name] for name in names]
    ] * 2
    few = make_run(tmp_path / "few", num_problems=2, done=[8, 1])
    done = treegen("power", "--run", few)
    assert f"the run {few} has 1; choose another run, or pass --between" in done.error
