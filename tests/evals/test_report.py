"""Votes and reports: from verdicts on samples to metrics with error bars."""

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.errors import InputError
from treegen.evals.statistics.metrics import default_maj_ks, default_pass_ks
from treegen.evals.statistics.votes import tally
from treegen.tasks import Report, ReportOptions, SampleScore, Verdict, majority_vote, summarize

ANSWER = {"r": Verdict("18", True), "w": Verdict("7", False), "v": Verdict("8", False)}
ANSWER["-"] = Verdict(None, False)


def scored(problem_id: str, letters: str, filter: str = "numeric") -> list[SampleScore]:
    """Make the samples of a problem: r right, w and v wrong, - unreadable, capital: cut off."""
    return [
        SampleScore(
            problem_id,
            index,
            "length" if letter.isupper() else "stop",
            {filter: ANSWER[letter.lower()]},
        )
        for index, letter in enumerate(letters)
    ]


def report_on(
    groups: dict[str, str],
    *,
    num_samples: int,
    pass_ks: Sequence[int] | None = None,
    maj_ks: Sequence[int] | None = None,
) -> Report:
    scores = [score for key, letters in groups.items() for score in scored(key, letters)]
    options = ReportOptions(
        problem_ids=list(groups),
        num_samples=num_samples,
        num_fewshot=8,
        pass_ks=pass_ks,
        maj_ks=maj_ks,
    )
    return summarize(scores, options, task="t", version="1", filters=["numeric"])


def test_the_most_frequent_answer_wins_and_none_has_no_vote() -> None:
    vote = majority_vote([None, "7", None, "18", "18", None, None])
    assert (vote.answer, vote.votes, vote.tied) == ("18", 2, ("18",))


def test_tied_answers_are_all_named_the_first_given_one_shown() -> None:
    vote = majority_vote(["7", "18", "8", "18", "7"])
    assert (vote.answer, vote.tied) == ("7", ("7", "18"))


@pytest.mark.parametrize("answers", [[], [None, None]])
def test_a_vote_without_valid_answers_has_no_winner(answers: list[str | None]) -> None:
    vote = majority_vote(answers)
    assert (vote.answer, vote.votes, vote.tied) == (None, 0, ())


@given(st.lists(st.sampled_from("rwv-"), min_size=1, max_size=12))
def test_full_vote_agrees_with_the_tally(letters: list[str]) -> None:
    verdicts = [ANSWER[letter] for letter in letters]
    vote = majority_vote(verdict.answer for verdict in verdicts)
    counted = tally(verdicts)
    assert counted.num_samples == len(letters)
    share = ("18" in vote.tied) / len(vote.tied) if vote.tied else 0.0
    assert counted.maj_at_k(len(letters)) == share
    assert counted.votes_at((len(letters),)) == ((share, len(vote.tied) > 1),)


def test_an_unreadable_answer_cannot_be_correct() -> None:
    with pytest.raises(InputError):
        Verdict(None, True)


def test_report_by_hand() -> None:
    report = report_on({"a": "rrW-", "b": "wwwv", "c": "rrrr"}, num_samples=4, maj_ks=[1, 4])
    assert report.value("exact_match", "numeric") == pytest.approx((0.5 + 0 + 1) / 3)
    assert report.value("pass@4", "numeric") == pytest.approx(2 / 3)
    assert report.value("invalid", "numeric") == pytest.approx(1 / 12)
    assert report.value("truncated", "none") == pytest.approx(1 / 12)
    assert [row.k for row in report.majority] == [1, 4]
    assert [row.value for row in report.majority] == pytest.approx([0.5, 2 / 3])
    assert [row.tie_rate for row in report.majority] == [0.0, 0.0]
    row = report.metrics[0]
    assert (row.task, row.version, row.filter, row.num_fewshot) == ("t", "1", "numeric", 8)
    # Problems, not samples, are the unit: the standard deviation of (.5, 0, 1) over root 3.
    assert row.stderr == pytest.approx(0.5 / 3**0.5)
    assert not next(row for row in report.metrics if row.metric == "invalid").higher_is_better
    assert (report.num_problems, report.num_samples, report.incomplete) == (3, 12, ())


def test_ties_are_shared_and_their_rate_reported() -> None:
    report = report_on({"a": "rw--", "b": "rrrr"}, num_samples=4, maj_ks=[4])
    assert report.majority[0].value == pytest.approx(0.75)
    assert report.majority[0].tie_rate == pytest.approx(0.5)


def test_votes_of_k_use_all_subsets_and_not_the_first_k() -> None:
    first = report_on({"a": "rrrwww"}, num_samples=6, maj_ks=[3])
    other = report_on({"a": "wrwrwr"}, num_samples=6, maj_ks=[3])
    assert first == other
    assert first.majority[0].value == pytest.approx(0.5)


@given(st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(shuffler: random.Random) -> None:
    scores = [
        s for key, text in (("a", "rw-r"), ("b", "wvr"), ("c", "-r")) for s in scored(key, text)
    ]
    options = ReportOptions(problem_ids=["a", "b", "c", "d"], num_samples=4)
    want = summarize(scores, options, task="t", version="1", filters=["numeric"])
    shuffler.shuffle(scores)
    assert summarize(scores, options, task="t", version="1", filters=["numeric"]) == want


def test_missing_samples_are_reported_and_undefined_metrics_say_why() -> None:
    report = report_on({"a": "rr", "b": "rrrr", "c": ""}, num_samples=4, pass_ks=[2, 3])
    assert [(i.problem_id, i.num_samples, i.planned) for i in report.incomplete] == [
        ("a", 2, 4),
        ("c", 0, 4),
    ]
    assert report.value("pass@2", "numeric") == 1.0
    undefined = next(row for row in report.metrics if row.metric == "pass@3")
    assert undefined.value is None
    assert undefined.reason == "1 of 2 problems have fewer than 3 samples"
    assert [row.value is None for row in report.majority] == [False, False, True, True]
    json.dumps(report.to_json(), allow_nan=False)


def test_k_above_the_number_of_samples_is_kept_as_undefined() -> None:
    report = report_on({"a": "rr"}, num_samples=2, pass_ks=[1, 10], maj_ks=[5])
    assert report.value("pass@10", "numeric") is None
    assert report.majority[0].reason == "1 of 1 problems have fewer than 5 samples"


def test_report_without_any_sample() -> None:
    report = report_on({"a": ""}, num_samples=2)
    assert report.value("exact_match", "numeric") is None
    assert {row.reason for row in report.metrics} == {"no samples"}


def test_report_refuses_what_was_not_planned_and_what_comes_twice() -> None:
    options = ReportOptions(problem_ids=["a"], num_samples=2)
    with pytest.raises(InputError, match="which is not in problem_ids"):
        summarize(scored("b", "r"), options, task="t", version="1", filters=["numeric"])
    with pytest.raises(InputError, match="sample 0 twice"):
        summarize(scored("a", "r") * 2, options, task="t", version="1", filters=["numeric"])
    with pytest.raises(InputError, match="num_samples"):
        ReportOptions(problem_ids=["a"], num_samples=0)
    with pytest.raises(InputError, match="k must be"):
        ReportOptions(problem_ids=["a"], num_samples=1, maj_ks=[0])


@pytest.mark.parametrize(
    ("num_samples", "maj_ks", "pass_ks"),
    [
        (1, (1,), ()),
        (3, (1, 2, 3), (3,)),
        (40, (1, 8, 16, 24, 32, 40), (10, 40)),
        (1024, (1, 205, 410, 614, 819, 1024), (10, 100, 1000, 1024)),
    ],
)
def test_default_ks(num_samples: int, maj_ks: tuple[int, ...], pass_ks: tuple[int, ...]) -> None:
    assert default_maj_ks(num_samples) == maj_ks
    assert default_pass_ks(num_samples) == pass_ks
