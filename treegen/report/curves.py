"""Data of the plots: metrics over k, the votes of each problem, and lengths."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from treegen.evals.statistics.estimators import Estimate, estimate, pass_at_k
from treegen.evals.statistics.metrics import HasGroup, clusters_of
from treegen.evals.statistics.votes import count_distinct, count_verdicts, tally, winner
from treegen.evals.verdict import Verdict
from treegen.report.view import RunView, Sample

_MAX_KS: Final = 12  # because maj@k takes about a millisecond per problem and k

RIGHT, WRONG, INVALID, UNSCORED = "right", "wrong", "invalid", "not judged"
# The outcomes of searches: a search without a solution has no answer that could be invalid.
SOLVED, UNSOLVED = "solved", "unsolved"
OUTCOMES: Final = (RIGHT, WRONG, INVALID, UNSCORED, SOLVED, UNSOLVED)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric as a function of k, with 95% intervals over problems."""

    metric: str
    """"pass@k" or "maj@k"."""
    ks: tuple[int, ...]
    """The numbers of samples, ascending."""
    values: tuple[Estimate, ...]
    """The metric for each k."""


@dataclass(frozen=True, slots=True)
class VoteShares:
    """The votes of one problem's samples, as shares of all its samples."""

    problem_id: str
    right: float
    """The share of correct answers."""
    top_wrong: float
    """The share of the most frequent wrong answer."""
    other_wrong: float
    """The share of all other wrong answers."""
    invalid: float
    """The share of samples without an answer."""
    answer: str | None
    """The answer with the most votes, the first of tied ones; None if none was readable."""
    top_share: float
    """The share of that answer."""
    tied: bool
    """Whether several answers have the most votes."""
    won: bool
    """Whether a correct answer is among those with the most votes."""


def choose_ks(num_samples: int) -> tuple[int, ...]:
    """Return at most 12 values of k from 1 to num_samples, denser at small k."""
    if num_samples <= _MAX_KS:
        return tuple(range(1, num_samples + 1))
    ratio = num_samples ** (1 / (_MAX_KS - 1))
    return tuple(sorted({round(ratio**i) for i in range(_MAX_KS)} | {1, num_samples}))


def k_curves(
    verdicts: Mapping[str, Sequence[Verdict]],
    *,
    votes: bool = True,
    problems: Iterable[HasGroup] = (),
) -> list[Curve]:
    """Return pass@k and maj@k up to the smallest number of samples of any problem.

    Args:
        verdicts: The verdicts on the samples of each problem, by problem id.
        votes: Whether to compute maj@k. It is undefined for programs, because two programs are
            never equal answers.
        problems: The problems, for error bars clustered by their groups; empty for no clusters.
    """
    groups = list(verdicts.values())
    max_k = min(map(len, groups), default=0)
    if max_k < 2:
        return []
    ks = choose_ks(max_k)
    counts = [(len(group), sum(verdict.correct for verdict in group)) for group in groups]
    clusters = clusters_of(problems, list(verdicts))
    passes = tuple(
        estimate([pass_at_k(num, num_right, k) for num, num_right in counts], clusters) for k in ks
    )
    curves = [Curve("pass@k", ks, passes)]
    if votes:
        tallies = [tally(group) for group in groups]
        votes_at_k = tuple(estimate([t.maj_at_k(k) for t in tallies], clusters) for k in ks)
        curves.append(Curve("maj@k", ks, votes_at_k))
    return curves


def vote_shares(verdicts: Mapping[str, Sequence[Verdict]]) -> list[VoteShares]:
    """Return the votes of each problem, the problem with the highest accuracy first."""
    shares = []
    for problem_id, group in verdicts.items():
        counts = count_verdicts(count_distinct(group))
        votes: dict[str | None, int] = {}
        for (answer, _), times in counts.items():
            votes[answer] = votes.get(answer, 0) + times
        vote = winner(votes)
        right = {answer: times for (answer, correct), times in counts.items() if correct}
        wrong = [t for (answer, correct), t in counts.items() if not (correct or answer is None)]
        max_wrong, num = max(wrong, default=0), len(group)
        num_right, num_wrong = sum(right.values()), sum(wrong)
        shares.append(
            VoteShares(
                problem_id=problem_id,
                right=num_right / num,
                top_wrong=max_wrong / num,
                other_wrong=(num_wrong - max_wrong) / num,
                invalid=(num - num_right - num_wrong) / num,
                answer=vote.answer,
                top_share=vote.votes / num,
                tied=len(vote.tied) > 1,
                won=not right.keys().isdisjoint(vote.tied),
            )
        )
    return sorted(shares, key=lambda share: (-share.right, share.top_wrong, share.problem_id))


def classify_sample(sample: Sample, filter: str) -> str:
    """Return the outcome of a sample by one filter, one of OUTCOMES."""
    verdict = sample.verdict(filter)
    if verdict is None:
        return UNSCORED
    if sample.searched:
        return SOLVED if verdict.correct else UNSOLVED
    if verdict.correct:
        return RIGHT
    return INVALID if verdict.answer is None else WRONG


def finish_counts(view: RunView) -> dict[str, dict[str, int]]:
    """Return the number of samples by finish reason and then by outcome."""
    counts = Counter((s.finish_reason, classify_sample(s, view.headline)) for s in view.samples)
    reasons = sorted({reason for reason, _ in counts}, key=lambda r: (r != "stop", r))
    return {
        reason: {outcome: counts[reason, outcome] for outcome in OUTCOMES} for reason in reasons
    }


def lengths(view: RunView) -> dict[str, list[int]]:
    """Return the lengths of samples in tokens by outcome; outcomes without samples are left out."""
    by_outcome: dict[str, list[int]] = {name: [] for name in OUTCOMES}
    for sample in view.samples:
        by_outcome[classify_sample(sample, view.headline)].append(sample.num_tokens)
    return {name: values for name, values in by_outcome.items() if values}
