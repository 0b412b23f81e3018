"""Tokens against accuracy: the cost of a majority of k samples, and of stopping early."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from treegen.common.formatting import format_table
from treegen.errors import InputError, arg
from treegen.evals.statistics.confidence import STOPPED
from treegen.evals.statistics.estimators import Estimate, difference_interval, estimate
from treegen.evals.statistics.metrics import Clusters, HasGroup, clusters_of
from treegen.evals.statistics.replay import (
    DrawnProblem,
    RuleOutcome,
    replay_early_stopping,
    replay_majority,
)
from treegen.evals.statistics.votes import tally
from treegen.report.curves import choose_ks
from treegen.report.tables import interval
from treegen.report.view import RunView

CHANCES: Final = (0.7, 0.8, 0.9, 0.95, 0.99)
_THIRDS: Final = (("hard", 0.0, 1 / 3), ("medium", 1 / 3, 2 / 3), ("easy", 2 / 3, 1.1))


@dataclass(frozen=True, slots=True)
class Point:
    """The cost and the accuracy of one rule on some problems; `treegen replay` prints it."""

    name: str
    """The name of the rule, such as maj@64 or decided:0.95."""
    vote: Estimate
    """The mean correctness of the vote, with its interval over problems."""
    tokens: float
    """Mean number of tokens over problems."""
    samples: float
    """Mean number of samples over problems."""
    difference: float
    """`vote` minus the vote of all samples."""
    low: float
    """The lower bound of the paired 95% interval of `difference` over problems."""
    high: float
    """The upper bound of the paired 95% interval of `difference` over problems."""
    saved: float
    """The share of tokens that the rule saves compared with all samples."""
    vote_at_equal_tokens: float
    """The vote of a majority over as many tokens as the rule takes."""
    saved_at_equal_vote: float | None
    """The share of tokens that the rule saves compared with the smallest majority whose vote is at
    least `vote`; None if no majority is as good."""


@dataclass(frozen=True, slots=True)
class Savings:
    """The tokens that stopping rules save on some problems of a run."""

    label: str
    """The group of problems: all, hard, medium or easy."""
    num_problems: int
    majority: tuple[Point, ...]
    """Majorities of k samples, for ascending k; the last is that of all samples."""
    rules: tuple[Point, ...]
    """The stopping rules."""

    def __str__(self) -> str:
        """Return a table of the rules, and of the vote of all samples."""
        last = self.majority[-1]
        rows = [
            [
                row.name,
                f"{row.vote.value:.3f}",
                interval(row.vote.low, row.vote.high),
                f"{row.samples:,.1f}",
                f"{row.tokens:,.0f}",
                f"{row.saved:.1%}",
                f"{row.difference:+.3f}",
                interval(row.low, row.high, signed=True),
                "" if row is last else f"{row.vote_at_equal_tokens:.3f}",
                ""
                if row is last or row.saved_at_equal_vote is None
                else f"{row.saved_at_equal_vote:.1%}",
            ]
            for row in (*self.rules, last)
        ]
        head = [
            "Rule",
            "Vote",
            "95% interval",
            "Samples",
            "Tokens",
            "Saved",
            f"Minus {last.name}",
            "95% interval",
            "Majority of as many tokens",
            "Saved at this vote",
        ]
        named = "all problems" if self.label == "all" else f"{self.label} problems"
        return f"{named} ({self.num_problems:,})\n{format_table(head, rows, range(1, len(head)))}"


def get_replay_problems(view: RunView, filter: str) -> dict[str, DrawnProblem]:
    """Return the samples of each complete problem, for a run that drew all samples.

    Raises:
        InputError: nothing is scored, the run stopped early, it has too few samples, or it does
            not record numbers of tokens, as some imported logs.
    """
    if not filter:
        raise InputError(view.why_unscored)
    if view.voters is not None or any(s.finish_reason == STOPPED for s in view.samples):
        raise InputError(
            f"the run {view.path} used early stopping, so the samples after the stop are "
            "missing; draw the missing samples with --resume and --stop-when never"
        )
    complete = {}
    for problem in view.problems:
        pairs = [(s.verdict(filter), s.num_tokens) for s in problem.samples]
        scored = [(verdict, tokens) for verdict, tokens in pairs if verdict is not None]
        if len(scored) >= max(view.num_samples, 2):
            verdicts, tokens = zip(*scored, strict=True)
            complete[problem.id] = DrawnProblem(verdicts, tokens)
    if not complete:
        raise InputError(
            f"no finished problem of the run {view.path} has two or more samples for a vote; "
            f"draw more samples with {arg('num_samples=')}"
        )
    if not any(any(problem.tokens) for problem in complete.values()):
        raise InputError(
            f"the run {view.path} does not record how many tokens its samples have; choose a run "
            "that treegen sampled"
        )
    return complete


def savings(
    drawn: Mapping[str, DrawnProblem],
    *,
    batch: int = 8,
    chances: Sequence[float] = CHANCES,
    problems: Iterable[HasGroup] = (),
) -> list[Savings]:
    """Return what stopping when decided saves: on all problems, and by their difficulty.

    A problem's difficulty is the share of its correct samples: below a third, below two thirds, or
    above.

    Args:
        drawn: The samples of each problem, as `get_replay_problems` returns them.
        batch: The number of samples in a round.
        chances: The probabilities at which a vote counts as decided, one rule each.
        problems: The problems, for error bars clustered by their groups; empty for no clusters.
    """
    share = {i: sum(v.correct for v in d.verdicts) / len(d.verdicts) for i, d in drawn.items()}
    cache = _ReplayCache(drawn, batch, chances, problems)
    groups = [("all", list(drawn))]
    groups += [
        (label, [i for i in drawn if low <= share[i] < high]) for label, low, high in _THIRDS
    ]
    # An imported log may lack the numbers of tokens of some problems.
    return [
        _compare_rules(label, ids, cache, chances)
        for label, ids in groups
        if any(any(drawn[i].tokens) for i in ids)
    ]


class _ReplayCache:
    """The outcomes of rules for each problem, computed once for all groups of problems."""

    def __init__(
        self,
        drawn: Mapping[str, DrawnProblem],
        batch: int,
        chances: Sequence[float],
        problems: Iterable[HasGroup],
    ) -> None:
        self.drawn = drawn
        self._clusters = clusters_of(problems, list(drawn))
        self._votes = {i: tally(problem.verdicts) for i, problem in drawn.items()}
        self._majorities: dict[tuple[str, int], RuleOutcome] = {}
        self._decided: dict[tuple[str, float], RuleOutcome] = {}
        for i, problem in drawn.items():
            outcomes = replay_early_stopping(problem, chances, batch)
            self._decided |= {
                (i, chance): end for chance, end in zip(chances, outcomes, strict=True)
            }

    def clusters(self, ids: Sequence[str]) -> Clusters:
        """Return the clusters of some problems; None if no problem has a group."""
        if self._clusters is None:
            return None
        cluster_of = dict(zip(self.drawn, self._clusters, strict=True))
        return [cluster_of[i] for i in ids]

    def replay_majority(self, ids: Sequence[str], k: int) -> list[RuleOutcome]:
        """Return the expected outcome of a majority vote over k samples, for each problem."""
        for i in ids:
            if (i, k) not in self._majorities:
                self._majorities[i, k] = replay_majority(self.drawn[i], k, self._votes[i])
        return [self._majorities[i, k] for i in ids]

    def replay_stopping(self, ids: Sequence[str], chance: float) -> list[RuleOutcome]:
        """Return the outcome of stopping at a probability, for each problem."""
        return [self._decided[i, chance] for i in ids]


def _compare_rules(
    label: str, ids: Sequence[str], cache: _ReplayCache, chances: Sequence[float]
) -> Savings:
    max_k = min(len(cache.drawn[i].tokens) for i in ids)
    curve = {k: cache.replay_majority(ids, k) for k in choose_ks(max_k)}
    votes = {k: _mean_vote(outcomes) for k, outcomes in curve.items()}

    def point(name: str, outcomes: Sequence[RuleOutcome]) -> Point:
        return _make_point(name, outcomes, curve, votes, ids, cache)

    majority = tuple(point(f"maj@{k}", outcomes) for k, outcomes in curve.items())
    rules = tuple(
        point(f"decided:{chance:g}", cache.replay_stopping(ids, chance)) for chance in chances
    )
    return Savings(label, len(ids), majority, rules)


def _make_point(
    name: str,
    outcomes: Sequence[RuleOutcome],
    curve: Mapping[int, Sequence[RuleOutcome]],
    votes: Mapping[int, float],
    ids: Sequence[str],
    cache: _ReplayCache,
) -> Point:
    """Return the point of a rule.

    Args:
        name: Name of the rule.
        outcomes: Outcome of the rule for each problem.
        curve: Outcomes of the majority of each k.
        votes: Mean vote of the majority of each k.
        ids: Ids of the problems.
        cache: The outcomes of rules for each problem.
    """
    full_votes = curve[max(curve)]
    tokens = _mean_tokens(outcomes)
    clusters = cache.clusters(ids)
    vote = estimate([outcome.vote for outcome in outcomes], clusters)
    differences = [
        stopped.vote - all.vote for stopped, all in zip(outcomes, full_votes, strict=True)
    ]
    low, high = difference_interval(differences, clusters)
    k = max(1, min(max(curve), round(tokens / _mean_tokens(curve[1]))))
    # A majority is as good if its vote is lower by rounding only.
    good_ks = [k for k, mean_vote in votes.items() if mean_vote >= vote.value - 1e-9]
    return Point(
        name=name,
        vote=vote,
        tokens=tokens,
        samples=fmean(outcome.samples for outcome in outcomes),
        difference=fmean(differences),
        low=low,
        high=high,
        saved=1 - tokens / _mean_tokens(full_votes),
        vote_at_equal_tokens=_mean_vote(cache.replay_majority(ids, k)),
        saved_at_equal_vote=1 - tokens / _mean_tokens(curve[min(good_ks)]) if good_ks else None,
    )


def _mean_tokens(outcomes: Sequence[RuleOutcome]) -> float:
    return fmean(outcome.tokens for outcome in outcomes)


def _mean_vote(outcomes: Sequence[RuleOutcome]) -> float:
    return fmean(outcome.vote for outcome in outcomes)
