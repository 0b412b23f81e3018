"""Error bars of problems that are no independent draws, by definition and by simulation."""

import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from cli_cases import Command, write_jsonl

from treegen.evals.identity import load_stored_job
from treegen.evals.problem import Problem
from treegen.evals.sample_recorder import SampleRecorder
from treegen.evals.statistics.estimators import estimate, mean_interval, standard_error
from treegen.evals.statistics.metrics import ReportOptions
from treegen.evals.verdict import SampleScore
from treegen.report.compare import CLUSTERED, compare_runs
from treegen.report.load import load_run
from treegen.runs import RunDir
from treegen.tasks import get_task
from treegen.tasks.programs.report import ProgramVerdict


def test_each_problem_a_cluster_is_the_usual_error() -> None:
    rng = np.random.default_rng(0)
    for num in (2, 5, 40):
        values = rng.random(num).tolist()
        usual = float(np.std(values, ddof=1)) / math.sqrt(num)
        assert standard_error(values) == pytest.approx(usual)
        assert standard_error(values, list(range(num))) == pytest.approx(usual)
        assert mean_interval(values, 0, 1, list(range(num))) == pytest.approx(
            mean_interval(values, 0, 1)
        )
    assert standard_error([0.5]) is None
    assert standard_error([0.5, 0.7], ["p", "p"]) is None


def test_the_error_is_that_of_a_regression_with_clusters() -> None:
    """CR1 of a regression on a constant: (X'X)^-1 X' u u' X (X'X)^-1 by cluster."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        clusters = rng.integers(0, 7, 30).tolist()
        values = rng.random(30).tolist()
        ones, y = np.ones((30, 1)), np.array(values)
        bread = np.linalg.inv(ones.T @ ones)
        residuals = y - y.mean()
        meat = np.zeros((1, 1))
        for cluster in set(clusters):
            members = np.array(clusters) == cluster
            score = ones[members].T @ residuals[members]
            meat += np.outer(score, score)
        num = len(set(clusters))
        expected = math.sqrt(float((bread @ meat @ bread)[0, 0]) * num / (num - 1))
        assert standard_error(values, clusters) == pytest.approx(expected)


def test_clustered_intervals_cover_where_plain_ones_do_not() -> None:
    rng = np.random.default_rng(2)
    hits = {"plain": 0, "clustered": 0}
    tries = 1000
    for _ in range(tries):
        chances = np.repeat(rng.beta(2, 2, 30), 5)  # five questions on each of thirty passages
        values = (rng.random(150) < chances).astype(float).tolist()
        clusters = np.repeat(np.arange(30), 5).tolist()
        for name, by in (("plain", None), ("clustered", clusters)):
            low, high = mean_interval(values, 0, 1, by)
            hits[name] += low <= 0.5 <= high
    assert 0.93 <= hits["clustered"] / tries <= 0.98
    assert hits["plain"] < 0.9 * tries
    whole = estimate([1.0] * 10, ["p"] * 10)
    assert whole.stderr is None and whole.low < 0.7


def test_a_field_of_the_data_clusters_an_eval_and_a_comparison(
    tiny: Path, tmp_path: Path, treegen: Command
) -> None:
    rows = [
        {"question": f"Say {i}", "answer": "e", "passage": f"p{i % 3}", "id": str(i)}
        for i in range(9)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    how = shlex.split(
        f"-M {tiny} --data {data} -T metric=contains --max-tokens 12 -n 4 --temperature 1"
        " --memory 4MiB -q"
    )
    errors = {}
    for name, more in (("plain", []), ("by", ["-T", "group_field=passage"])):
        done = treegen("eval", "jsonl", *how, *more, "-o", tmp_path / name)
        assert done.code == 0, done.err
        errors[name] = done.document["runs"][0]["report"]["metrics"][0]
    assert errors["plain"]["value"] == errors["by"]["value"]
    assert errors["plain"]["low"] != errors["by"]["low"]
    # The progress of a run shows the same interval.
    with RunDir.open(tmp_path / "by") as run:
        tally = SampleRecorder(load_stored_job({}, run), run).tally
        assert tally is not None and (shown := tally.estimate()) is not None
        assert (shown.low, shown.high) == (errors["by"]["low"], errors["by"]["high"])
    other = tmp_path / "other"
    treegen("eval", "jsonl", *how, "--seed", "1", "-T", "group_field=passage", "-o", other)
    found = compare_runs(load_run(tmp_path / "by"), load_run(other))
    assert {row.method for row in found.differences} == {CLUSTERED}
    assert found.tokens is not None and found.tokens.a > 0
    missing = treegen("eval", "jsonl", *how, "-T", "group_field=passages", "-o", tmp_path / "x")
    assert "passages" in missing.error


@pytest.mark.parametrize("name", ["math500", "apps"])
def test_tables_and_rates_are_clustered_like_accuracies(name: str) -> None:
    column = {"math500": "subject", "apps": "difficulty"}[name]
    problems = [
        Problem(f"p{i}", "q", "1", {column: f"half {i % 2}"}, group=f"g{i // 8}") for i in range(24)
    ]
    right = [i % 8 < 3 for i in range(24)]
    task = get_task(name)
    scores = []
    for problem, is_right in zip(problems, right, strict=True):
        outcome = "accepted" if is_right else "timeout"
        verdict = ProgramVerdict("h", is_right, float(is_right), outcome)
        scores.append(SampleScore(problem.id, 0, "stop", dict.fromkeys(task.filters, verdict)))
    ids = [problem.id for problem in problems]
    report = task.aggregate(
        scores, ReportOptions(problem_ids=ids, num_samples=1, problems=problems)
    )
    table = next(table for table in report.tables if column in table.title)
    for half, row in enumerate(table.rows):
        members = range(half, 24, 2)
        expected = estimate([float(right[i]) for i in members], [i // 8 for i in members])
        assert row[2:] == (expected.value, expected.stderr, expected.low, expected.high)
    if name == "apps":
        rate = next(metric for metric in report.metrics if metric.metric == "timeout")
        expected = estimate([float(not flag) for flag in right], [i // 8 for i in range(24)])
        assert (rate.stderr, rate.low, rate.high) == (expected.stderr, expected.low, expected.high)
