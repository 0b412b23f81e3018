"""Runs that stopped beside runs that did not, and what stopping would have saved."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import Command
from report_cases import make_run

from treegen.errors import InputError
from treegen.evals.statistics.estimators import adjusted_difference, estimate
from treegen.evals.statistics.replay import replay_early_stopping, replay_majority
from treegen.evals.verdict import Verdict
from treegen.report.compare import compare_runs
from treegen.report.load import load_run
from treegen.report.plots.runs import run_plots
from treegen.report.stopping_savings import get_replay_problems, savings
from treegen.report.view import RunView
from treegen.search.strategies.majority import is_decided

N = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "whole", num_problems=10, num_samples=N)


@pytest.fixture(scope="module")
def stopped(whole: Path) -> Path:
    """The same run as the rule would have drawn it."""
    verdicts = load_run(whole).verdicts("numeric")
    ends = []
    for verdicts_of_problem in verdicts.values():
        answers = [verdict.answer for verdict in verdicts_of_problem]
        ends.append(next((e for e in range(4, N, 4) if is_decided(answers[:e], 0.95)), N))
    return make_run(
        whole.parent / "stopped",
        num_problems=10,
        num_samples=N,
        done=ends,
        stop_when="decided:0.95",
        stop_batch=4,
    )


def test_a_stopped_run_is_whole_and_compared_by_its_votes(whole: Path, stopped: Path) -> None:
    a, b = load_run(whole), load_run(stopped)
    assert not b.notices and b.fixed == 4
    found = compare_runs(a, b)
    assert not found.left_out
    rows = {row.metric: row for row in found.differences if row.filter == "numeric"}
    assert list(rows) == ["accuracy", "vote", "maj@4", "pass@4"]
    # The first round is the same samples in both, but the whole run has more of them.
    first = [verdicts_of_problem[:4] for verdicts_of_problem in a.verdicts("numeric").values()]
    assert rows["accuracy"].b == pytest.approx(
        estimate(
            [sum(v.correct for v in verdicts_of_problem) / 4 for verdicts_of_problem in first]
        ).value
    )
    votes = [load_run(whole).verdicts("numeric")[p.id][: len(p.samples)] for p in b.problems]
    assert rows["vote"].b == pytest.approx(
        sum(_majority(verdicts_of_problem) for verdicts_of_problem in votes) / len(votes)
    )
    assert found.tokens is not None
    assert found.tokens.b == sum(s.num_tokens for s in b.samples) < found.tokens.a
    assert found.tokens.value == pytest.approx((found.tokens.b - found.tokens.a) / 10)
    same = compare_runs(a, a)
    assert same.tokens is not None and same.tokens.value == 0 and same.tokens.p_value is None


def _majority(verdicts: Sequence[Verdict]) -> float:
    from treegen.evals.statistics.votes import tally

    return tally(verdicts).maj_at_k(len(verdicts))


def test_savings_of_all_problems_and_of_hard_ones(whole: Path, stopped: Path) -> None:
    drawn = get_replay_problems(load_run(whole), "numeric")
    found = savings(drawn, batch=4)
    assert found[0].label == "all"
    assert sum(group.num_problems for group in found[1:]) == found[0].num_problems == 10
    for group in found:
        last = group.majority[-1]
        assert last.difference == 0 and last.saved == pytest.approx(0) and last.samples == N
        tokens = [rule.tokens for rule in group.rules]
        assert tokens == sorted(tokens)  # the surer one wants to be, the more is drawn
        assert all(
            0 <= rule.saved < 1 and rule.low <= rule.difference <= rule.high for rule in group.rules
        )
    with pytest.raises(InputError, match="used early stopping"):
        get_replay_problems(load_run(stopped), "numeric")


def test_the_command_and_the_plot(whole: Path, stopped: Path, treegen: Command) -> None:
    done = treegen("replay", whole, "--chance", "0.9", "--stop-batch", "2")
    assert done.code == 0 and "Saved" in done.out
    assert [rule["name"] for rule in done.document["groups"][0]["rules"]] == ["decided:0.9"]
    assert "used early stopping" in treegen("replay", stopped).error
    names = [plot.name for plot in run_plots(load_run(whole))]
    assert "votes_over_tokens" in names
    stops = {plot.name: plot for plot in run_plots(load_run(stopped))}
    assert "votes_over_tokens" not in stops and "metrics_over_k" in stops
    for plot in run_plots(load_run(whole)):
        if plot.name == "votes_over_tokens":
            assert plot.render().svg


def test_an_imported_log_may_lack_numbers_of_tokens(whole: Path) -> None:
    view = load_run(whole)
    hard = {
        p.id for p in view.problems if sum(v.correct for v in view.verdicts("numeric")[p.id]) < 7
    }
    assert 0 < len(hard) < len(view.problems)

    def without_tokens(ids: set[str]) -> RunView:
        problems = [
            replace(p, samples=tuple(replace(s, num_tokens=0) for s in p.samples))
            if p.id in ids
            else p
            for p in view.problems
        ]
        return replace(view, problems=tuple(problems))

    drawn = get_replay_problems(without_tokens(hard), "numeric")
    assert {"all", "hard"} - {group.label for group in savings(drawn)} == {"hard"}
    none = without_tokens({p.id for p in view.problems})
    assert "votes_over_tokens" not in {plot.name for plot in run_plots(none)}
    with pytest.raises(InputError, match="does not record how many tokens"):
        get_replay_problems(none, "numeric")


def test_a_real_run_has_the_same_votes_with_fewer_tokens(repository: Path) -> None:
    """The bundled model's run: 40% fewer tokens, and no difference that a paired test finds."""
    drawn = get_replay_problems(load_run(repository / "examples" / "run"), "numeric")
    whole = [replay_majority(each, 20).vote for each in drawn.values()]
    stopped = [replay_early_stopping(each, [0.95], 4)[0] for each in drawn.values()]
    tokens = sum(each.tokens for each in stopped)
    assert tokens < 0.6 * sum(sum(each.tokens) for each in drawn.values())
    differences = [actual.vote - expected for actual, expected in zip(stopped, whole, strict=True)]
    assert abs(adjusted_difference(differences).statistic) < 1.3
    assert abs(sum(differences) / len(differences)) < 0.01
