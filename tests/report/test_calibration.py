"""Whether likely, agreed and short samples are right: the numbers, and when there are pictures."""

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import make_run

from treegen.evals.statistics.estimators import estimate
from treegen.evals.statistics.votes import count_distinct, count_verdicts, majority_vote, tally
from treegen.evals.verdict import Verdict
from treegen.report.calibration import (
    bin_by_probability,
    bin_by_tokens,
    bin_by_vote_share,
    bin_values,
    compute_problem_points,
    compute_within_problem_auc,
    expected_calibration_error,
    split_lengths,
    token_probability,
)
from treegen.report.curves import vote_shares
from treegen.report.load import load_run
from treegen.report.plots.runs import run_plots
from treegen.report.view import ProblemView, RunView, Sample

_PICTURES = {
    "probability_accuracy",
    "share_accuracy",
    "difficulty_votes",
    "tokens_accuracy",
    "lengths_by_verdict",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return load_run(make_run(tmp_path_factory.mktemp("runs") / "run", num_problems=15))


def with_samples(
    run: RunView, samples: Sequence[tuple[str, str, bool, float | None, int]]
) -> RunView:
    """A run of samples, each with its problem, answer, whether it is right, logprob and tokens."""
    groups: dict[str, list[Sample]] = {}
    for name, answer, right, logprob, tokens in samples:
        group = groups.setdefault(name, [])
        verdict = {"numeric": Verdict(answer, right)}
        group.append(Sample(name, len(group), "", tokens, logprob, "stop", verdict))
    problems = tuple(ProblemView(name, samples=tuple(group)) for name, group in groups.items())
    return replace(run, problems=problems, filters=("numeric",))


def test_bins_have_equally_many_and_hold_every_value() -> None:
    rng = random.Random(4)
    values = [rng.random() for _ in range(1000)]
    right = [float(rng.random() < value) for value in values]
    found = bin_values(values, right)
    assert [each.num for each in found] == [100] * 10
    ranked = sorted(zip(values, right, strict=True))
    for number, each in enumerate(found):
        members = ranked[100 * number : 100 * number + 100]
        assert each.mean == pytest.approx(sum(v for v, _ in members) / 100)
        assert each.accuracy.value == estimate([r for _, r in members]).value
    # What is drawn as likely as it says is calibrated, up to noise.
    assert expected_calibration_error(found) < 0.06
    assert expected_calibration_error(bin_values(values, [1 - r for r in right])) > 0.3


def test_equal_values_share_a_bin() -> None:
    assert [each.num for each in bin_values([0.5] * 30, [1.0] * 30)] == [30]
    found = bin_values([1.0] * 50 + [2.0, 3.0], [1.0] * 52)
    assert sum(each.num for each in found) == 52 and found[0].mean == 1.0
    assert bin_values([], []) == []


def test_problems_are_the_unit_of_intervals_over_samples(run: RunView) -> None:
    # Ten samples of a problem that are all alike are worth one.
    samples = [(f"p{i % 10}", "x", i % 10 < 5, -1.0, 10) for i in range(100)]
    alike = with_samples(run, samples)
    (found,) = bin_by_tokens(alike, "numeric")
    whole = estimate([float(i < 5) for i in range(10)])
    assert found.accuracy.value == 0.5
    assert found.accuracy.stderr == pytest.approx(whole.stderr)
    loose = estimate([float(right) for _, _, right, _, _ in samples])
    assert found.accuracy.high - found.accuracy.low > 2 * (loose.high - loose.low)


def test_the_mean_probability_of_tokens_is_what_counts(run: RunView) -> None:
    sample = Sample("p", 0, "", 4, 4 * math.log(0.25), "stop", None)
    assert token_probability(sample) == pytest.approx(0.25)
    assert token_probability(replace(sample, logprob=None)) is None
    assert token_probability(replace(sample, num_tokens=0)) is None
    found = bin_by_probability(run, "numeric")
    assert sum(each.num for each in found) == run.num_done
    assert [each.mean for each in found] == sorted(each.mean for each in found)


def test_pairs_within_a_problem_tell_whether_likelier_is_right(run: RunView) -> None:
    # In a, two of two pairs; in b, one pair of two and a tie; c has no pair.
    samples = [
        ("a", "1", True, -1.0, 1),
        ("a", "2", False, -2.0, 1),
        ("a", "3", False, -3.0, 1),
        ("b", "1", True, -2.0, 1),
        ("b", "2", False, -2.0, 1),
        ("b", "3", False, -1.0, 1),
        ("c", "1", True, -9.0, 1),
        ("c", "1", True, None, 1),
    ]
    found = compute_within_problem_auc(with_samples(run, samples), "numeric")
    assert found is not None and found.num_problems == 2
    assert found.value == pytest.approx((1.0 + 0.25) / 2)
    assert compute_within_problem_auc(with_samples(run, samples[-2:]), "numeric") is None


def test_memory_for_pairs_grows_with_samples_and_not_with_their_square(run: RunView) -> None:
    view = with_samples(run, [("a", "1", i % 2 == 0, -float(i + 1), 1) for i in range(4000)])
    tracemalloc.start()
    try:
        found = compute_within_problem_auc(view, "numeric")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None and found.value == pytest.approx(2001 / 4000)
    assert peak < 2**21, "2,000 x 2,000 differences would take 32 MB"


def test_vote_shares_are_binned_with_groups_as_clusters(run: RunView) -> None:
    points = compute_problem_points(run, "numeric")
    groups = [f"g{i % 3}" for i in range(len(run.problems))]
    problems = [replace(p, group=group) for p, group in zip(run.problems, groups, strict=True)]
    grouped = bin_by_vote_share(replace(run, problems=tuple(problems)), points)
    shares, votes = [p.top_share for p in points], [p.vote for p in points]
    assert bin_by_vote_share(run, points) == bin_values(shares, votes)
    assert grouped == bin_values(shares, votes, groups) != bin_values(shares, votes)


def test_mean_votes_of_points_equal_the_report(run: RunView) -> None:
    points = compute_problem_points(run, "numeric")
    assert [point.index for point in points] == list(range(15))
    assert run.report is not None
    last = next(r for r in run.report.majority if (r.filter, r.k) == ("numeric", 8))
    assert sum(point.vote for point in points) / 15 == pytest.approx(last.value)
    accuracy = run.report.value("exact_match", "numeric")
    assert sum(point.accuracy for point in points) / 15 == pytest.approx(accuracy)
    assert all(point.top_share >= point.accuracy * (point.vote > 0) for point in points)


def test_lengths_are_split_by_correctness(run: RunView) -> None:
    samples = [("a", "1", True, None, n) for n in (1, 2, 30)]
    samples += [("a", "2", False, None, n) for n in (10, 20)]
    assert split_lengths(with_samples(run, samples), "numeric") == ([1, 2, 30], [10, 20])
    assert split_lengths(with_samples(run, samples[:3]), "numeric") == ([1, 2, 30], [])


def test_each_problem_is_a_link_in_a_plot(run: RunView, tmp_path: Path) -> None:
    plots = {plot.name: plot for plot in run_plots(run)}
    assert plots.keys() >= _PICTURES
    for name in ("share_accuracy", "difficulty_votes", "tokens_accuracy", "votes"):
        links = plots[name].render().links
        assert sorted(link.target for link in links) == list(range(15)), name
        for link in links:
            left, top, right, bottom = link.box
            assert 0 <= left < right <= 1 and 0 <= top < bottom <= 1
    bins = plots["difficulty"].render().links
    assert len(bins) == 10 and bins[9].target == "accuracy>=0.9"
    few = load_run(make_run(tmp_path / "few", num_problems=2, num_samples=2))
    assert not _PICTURES & {plot.name for plot in run_plots(few)}
    always = make_run(
        tmp_path / "right",
        num_problems=8,
        num_samples=4,
        draw=lambda rng, number, index: f"The answer is {number}.",
    )
    assert not _PICTURES & {plot.name for plot in run_plots(load_run(always))}


# Votes of a run's problems are those of a slow count of each sample on its own


def _drawn(rng: random.Random, num: int) -> list[Verdict]:
    """Verdicts with ties, without answers, and answers both right and wrong; equal ones shared."""
    answers = [None, *map(str, range(rng.randrange(5)))]
    pool = [Verdict(a, a is not None and rng.random() < 0.4) for a in answers for _ in range(2)]
    found = [rng.choice(pool) for _ in range(num)]
    return [Verdict(v.answer, v.correct) if rng.random() < 0.2 else v for v in found]


def _slow(group: Sequence[Verdict]) -> tuple[object, ...]:
    answers = [v.answer for v in group if v.answer is not None]
    votes = {answer: answers.count(answer) for answer in dict.fromkeys(answers)}
    top = max(votes.values(), default=0)
    tied = [answer for answer in votes if votes[answer] == top]
    wrong = Counter(v.answer for v in group if v.answer is not None and not v.correct)
    right, leading, num = sum(v.correct for v in group), max(wrong.values(), default=0), len(group)
    return (
        right / num,
        leading / num,
        (wrong.total() - leading) / num,
        (num - right - wrong.total()) / num,
        tied[0] if tied else None,
        top / num,
        len(tied) > 1,
        any(v.correct and v.answer in tied for v in group),
    )


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    groups = {f"p{i}": _drawn(rng, rng.randrange(1, 12)) for i in range(100)}
    shares = vote_shares(groups)
    for s in shares:
        actual = (
            s.right,
            s.top_wrong,
            s.other_wrong,
            s.invalid,
            s.answer,
            s.top_share,
            s.tied,
            s.won,
        )
        assert actual == _slow(groups[s.problem_id])
    order = [(-s.right, s.top_wrong, s.problem_id) for s in shares]
    assert order == sorted(order) and len(shares) == len(groups)


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_slow_count(seed: int) -> None:
    rng = random.Random(seed)
    for num in range(40):
        group = _drawn(rng, num)
        pairs = [(v.answer, v.correct) for v in group]
        counts = count_verdicts(count_distinct(group))
        assert list(counts.items()) == [(p, pairs.count(p)) for p in dict.fromkeys(pairs)]
        votes = tally(group)
        assert votes.num_samples == num
        assert votes.invalid == sum(answer is None for answer, _ in pairs)
        for kind, of_kind in ((True, votes.correct), (False, votes.wrong)):
            some = Counter(a for a, correct in pairs if a is not None and correct is kind)
            assert list(of_kind) == sorted(some.values())
        answers = [v.answer for v in group if v.answer is not None]
        vote = majority_vote(iter([v.answer for v in group]))
        top = max(map(answers.count, answers), default=0)
        tied = tuple(a for a in dict.fromkeys(answers) if answers.count(a) == top)
        assert (vote.answer, vote.votes, vote.tied) == (tied[0] if tied else None, top, tied)
