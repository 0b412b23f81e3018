"""What a report says follows from the samples, not from the order in which they ended."""

import random
from pathlib import Path

import pytest
from report_cases import make_run

from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.job import load_job
from treegen.evals.scoring.samples import aggregate
from treegen.evals.verdict import SampleScore
from treegen.report.load import load_run
from treegen.tasks.programs.report import ProgramVerdict


def test_shares_of_tests_add_up_in_any_order() -> None:
    """Sums of 0.1, 0.7 and 1/3 have other last digits in another order."""
    job = load_job(resolve_eval_settings({"task": "apps", "model": "made-up", "num_samples": 7}))
    rng = random.Random(0)
    scores = [
        SampleScore(
            problem_id=problem.id,
            sample_index=index,
            finish_reason="stop",
            verdicts={"tests": ProgramVerdict("x", False, rng.choice([0.1, 0.7, 1 / 3, 0.2]))},
        )
        for problem in job.data.problems
        for index in range(7)
    ]
    filters = job.task.filters
    assert filters[0] in scores[0].verdicts or len(filters) == 1
    scores = [
        SampleScore(s.problem_id, s.sample_index, s.finish_reason, {filters[0]: v})
        for s in scores
        for v in s.verdicts.values()
    ]
    first = aggregate(job, scores).to_json()
    for _ in range(10):
        rng.shuffle(scores)
        assert aggregate(job, scores).to_json() == first


@pytest.mark.parametrize("seed", range(3))
def test_a_run_whose_samples_ended_in_another_order_has_the_same_report(
    seed: int, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", num_problems=9, num_samples=7, votes=["all"], seed=seed)
    first = load_run(run)
    file = run / "samples.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    random.Random(seed).shuffle(lines)
    file.write_bytes(b"".join(lines))
    second = load_run(run)
    assert second.report == first.report and first.report is not None
    assert second.problems == first.problems
