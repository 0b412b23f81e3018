"""pass^k, G-Pass@k and the effective votes of a jury, against enumeration."""

import itertools
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from treegen.cli.main import cli
from treegen.errors import InputError
from treegen.evals.statistics.estimators import pass_at_k
from treegen.evals.statistics.reliability import (
    effective_votes,
    g_pass_at_k,
    mean_g_pass_at_k,
)


@given(st.integers(1, 9), st.data())
def test_metrics_are_shares_of_subsets(num: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    share = data.draw(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.75, 1.0]))
    subsets = [sum(i < right for i in s) for s in itertools.combinations(range(num), k)]
    whole = sum(count == k for count in subsets) / len(subsets)
    least = sum(count >= share * k - 1e-9 for count in subsets) / len(subsets)
    assert g_pass_at_k(num, right, k, 1.0) == pytest.approx(whole, abs=1e-12)
    assert g_pass_at_k(num, right, k, share) == pytest.approx(least, abs=1e-12)
    for low in (1e-6, 1e-12):
        assert g_pass_at_k(num, right, k, low) == pytest.approx(pass_at_k(num, right, k))
    half = math.ceil(k / 2)
    mean = 2 / k * sum(max(0, count - half) for count in subsets) / len(subsets)
    assert mean_g_pass_at_k(num, right, k) == pytest.approx(mean, abs=1e-12)


@given(st.floats(0.05, 0.95), st.integers(1, 4))
def test_the_estimates_are_unbiased(chance: float, k: int) -> None:
    num = 6
    weights = [math.comb(num, c) * chance**c * (1 - chance) ** (num - c) for c in range(num + 1)]
    mean = math.fsum(w * g_pass_at_k(num, c, k, 1.0) for c, w in enumerate(weights))
    assert mean == pytest.approx(chance**k)


def test_bad_numbers_are_errors_and_too_few_samples_are_undefined() -> None:
    assert math.isnan(g_pass_at_k(3, 2, 4, 1.0))
    for arguments in [(3, 4, 2, 0.5), (3, 1, 0, 0.5), (3, 1, 2, 0.0), (3, 1, 2, 1.1)]:
        with pytest.raises(InputError):
            g_pass_at_k(*arguments)


def test_a_run_reports_them_with_intervals(repository: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(repository / "examples" / "run", run)
    done = CliRunner().invoke(cli, ["score", str(run), "--pass-hat-k", "1,20", "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["runs"][0]
    rows = {row["metric"]: row for row in results["report"]["metrics"][::-1]}
    assert {"pass^1", "pass^20", "G-Pass@20_0.5", "G-Pass@20_0.75", "mG-Pass@20"} <= set(rows)
    assert rows["pass^20"]["low"] <= rows["pass^20"]["value"] < rows["pass^20"]["high"]
    assert results["settings"]["pass_hat_ks"] == [1, 20]
    done = CliRunner().invoke(cli, ["score", str(run), "--pass-hat-k", "21"])
    assert done.exit_code == 2 and "--pass-hat-k 21" in done.output


def test_effective_votes_of_known_juries() -> None:
    draw = np.random.default_rng(0).standard_normal
    own, shared = draw((4000, 5)), draw((4000, 1))
    problems = list(range(4000))
    for weight, want in ((0.0, 5.0), (1.0, 5 / (1 + 4 * 0.5))):  # correlation 0 and 1/2
        votes = effective_votes((own + weight * shared).tolist(), problems)
        assert votes is not None and votes.low < want < votes.high
        assert votes.value == pytest.approx(want, rel=0.06)
    alike = effective_votes(np.repeat(shared[:50], 3, axis=1).tolist(), problems[:50])
    assert alike is not None and alike.value == pytest.approx(1.0)
    assert effective_votes([[0.5], [0.2]], [0, 1]) is None
    assert effective_votes([[0.0, 0.0]] * 9, problems[:9]) is None


def test_the_interval_of_effective_votes_covers() -> None:
    """95% intervals of 300 juries of three judges with correlation 1/3, which are worth 1.8."""
    draw = np.random.default_rng(1).standard_normal
    hits = 0
    for _ in range(300):
        errors = draw((40, 3)) + math.sqrt(0.5) * draw((40, 1))
        votes = effective_votes(errors.tolist(), list(range(40)))
        hits += votes is not None and votes.low <= 1.8 <= votes.high
    assert 270 <= hits <= 297


def test_effective_votes_are_the_jackknife_over_clusters() -> None:
    draw = np.random.default_rng(1)
    errors = 5 + draw.standard_normal((40, 3)) + draw.standard_normal((40, 1))
    clusters = draw.integers(0, 9, 40)

    def ratio(table: np.ndarray) -> float:
        return float(table.var(axis=0, ddof=1).mean() / table.mean(axis=1).var(ddof=1))

    votes = effective_votes(errors.tolist(), clusters.tolist())
    logs = [math.log(ratio(errors[clusters != name])) for name in np.unique(clusters)]
    error = math.sqrt((len(logs) - 1) * np.var(logs))
    assert votes is not None and votes.value == pytest.approx(ratio(errors))
    assert votes.stderr == pytest.approx(error * votes.value)
    assert effective_votes([], []) is None


def test_many_samples_and_answers_take_little_time() -> None:
    start = time.process_time()
    for right in range(0, 1000, 20):
        mean_g_pass_at_k(1000, right, 500)
    errors = np.random.default_rng(0).standard_normal((6000, 3))
    assert effective_votes(errors.tolist(), range(6000)) is not None
    assert time.process_time() - start < 5
