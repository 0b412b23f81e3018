"""Calibration: how well token probabilities, vote shares and lengths predict correct samples.

Samples of one problem are not independent. So intervals over samples treat problems as clusters.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

import numpy as np

from treegen.evals.statistics.estimators import Estimate, estimate
from treegen.evals.statistics.metrics import clusters_of
from treegen.evals.statistics.votes import tally
from treegen.report.view import RunView, Sample

_MAX_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin of samples or problems with similar values, such as numbers of tokens."""

    mean: float
    """The mean value."""
    accuracy: Estimate
    """The mean correctness, with its interval."""
    num: int
    """The number of samples or problems."""


def bin_values(
    values: Sequence[float],
    correctness: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
) -> list[Bin]:
    """Return at most 10 bins of about equally many values, from low to high.

    Equal values are in the same bin.

    Args:
        values: The values to divide into bins.
        correctness: How correct the sample or vote of each value is, from 0 to 1.
        clusters: The cluster of each value; None if all values are independent.
    """
    if not values:
        return []
    num = len(values)
    order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
    ranked = np.asarray(values, dtype=np.float64)[order]
    edges = {0, num}
    for number in range(1, _MAX_BINS):
        edge = number * num // _MAX_BINS
        # Move the edge to the nearer end of the values that are equal to the one at the edge.
        first, last = (
            int(np.searchsorted(ranked, ranked[edge], side)) for side in ("left", "right")
        )
        edges.add(first if edge - first <= last - edge else last)
    bins = []
    for start, stop in pairwise(sorted(edges)):
        indices = order[start:stop].tolist()
        bin_clusters = None if clusters is None else [clusters[i] for i in indices]
        accuracy = estimate([correctness[i] for i in indices], bin_clusters)
        bins.append(Bin(float(ranked[start:stop].mean()), accuracy, len(indices)))
    return bins


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return the mean distance between confidence and accuracy (Guo et al. 2017).

    Args:
        bins: Bins whose values are probabilities, such as vote shares.
    """
    total = sum(b.num for b in bins)
    return math.fsum(abs(b.mean - b.accuracy.value) * b.num for b in bins) / total


def token_probability(sample: Sample) -> float | None:
    """Return the geometric mean of the probabilities of a sample's tokens; None if unknown."""
    if sample.logprob is None or not sample.num_tokens:
        return None
    return math.exp(min(0.0, sample.logprob / sample.num_tokens))


def get_scored_samples(view: RunView, filter: str) -> list[tuple[Sample, bool]]:
    """Return the scored samples of a run, and whether each is correct."""
    return [
        (sample, verdict.correct)
        for sample in view.samples
        if (verdict := sample.verdict(filter)) is not None
    ]


def bin_by_probability(view: RunView, filter: str) -> list[Bin]:
    """Return bins of samples by the geometric mean of their token probabilities."""
    return _bin_samples(
        view,
        [
            (value, is_correct, sample)
            for sample, is_correct in get_scored_samples(view, filter)
            if (value := token_probability(sample)) is not None
        ],
    )


def bin_by_tokens(view: RunView, filter: str) -> list[Bin]:
    """Return bins of samples by their number of tokens."""
    scored = get_scored_samples(view, filter)
    return _bin_samples(
        view, [(sample.num_tokens, is_correct, sample) for sample, is_correct in scored]
    )


def _bin_samples(view: RunView, rows: Sequence[tuple[float, bool, Sample]]) -> list[Bin]:
    """Return bins of samples, whose clusters are their problems or the problems' groups.

    Args:
        view: The run.
        rows: The value, the correctness and the sample.
    """
    values = [value for value, _, _ in rows]
    correctness = [float(is_correct) for _, is_correct, _ in rows]
    problem_ids = [sample.problem_id for _, _, sample in rows]
    return bin_values(values, correctness, clusters_of(view.problems, problem_ids) or problem_ids)


def compute_within_problem_auc(view: RunView, filter: str) -> Estimate | None:
    """Return the AUC of token probabilities as predictors of correctness, within problems.

    The AUC of a problem is the probability that a random correct sample has a higher mean
    probability of tokens than a random wrong sample; ties count half. The result is the mean over
    problems that have correct and wrong samples; None if there is no such problem.
    """
    probabilities: dict[str, tuple[list[float], list[float]]] = {}
    for sample, is_correct in get_scored_samples(view, filter):
        if (value := token_probability(sample)) is not None:
            probabilities.setdefault(sample.problem_id, ([], []))[is_correct].append(value)
    aucs, ids = [], []
    for problem_id, (wrong, correct) in probabilities.items():
        if wrong and correct:
            # Ranks, because a problem may have thousands of samples, and thus millions of pairs.
            ranks = [np.searchsorted(np.sort(wrong), correct, side) for side in ("left", "right")]
            aucs.append(float(np.mean(ranks)) / len(wrong))
            ids.append(problem_id)
    return estimate(aucs, clusters_of(view.problems, ids)) if aucs else None


@dataclass(frozen=True, slots=True)
class ProblemPoint:
    """The samples of a problem in numbers, as a point of a plot."""

    index: int
    """The index of the problem in the run."""
    accuracy: float
    """The share of correct samples."""
    top_share: float
    """The share of samples with the most frequent answer."""
    vote: float
    """The correctness of the majority vote; 1/m if one of m tied answers is correct."""
    mean_tokens: float
    """The mean number of tokens of a sample."""


def compute_problem_points(view: RunView, filter: str) -> list[ProblemPoint]:
    """Return a point for each scored problem of a run."""
    verdicts = view.verdicts(filter)
    points = []
    for index, problem in enumerate(view.problems):
        if not (problem_verdicts := verdicts.get(problem.id)):
            continue
        votes, num = tally(problem_verdicts), len(problem_verdicts)
        tokens = [s.num_tokens for s in problem.samples if s.verdict(filter) is not None]
        points.append(
            ProblemPoint(
                index=index,
                accuracy=sum(verdict.correct for verdict in problem_verdicts) / num,
                top_share=max((*votes.correct, *votes.wrong), default=0) / num,
                vote=votes.maj_at_k(num),
                mean_tokens=fmean(tokens),
            )
        )
    return points


def bin_by_vote_share(view: RunView, points: Sequence[ProblemPoint]) -> list[Bin]:
    """Return bins of problems by the share of their most frequent answer.

    Args:
        view: The run.
        points: Its problems, as `compute_problem_points` returns them.
    """
    clusters = clusters_of(view.problems, [view.problems[p.index].id for p in points])
    return bin_values([p.top_share for p in points], [p.vote for p in points], clusters)


def split_lengths(view: RunView, filter: str) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens of correct and of wrong samples."""
    lengths: tuple[list[int], list[int]] = ([], [])
    for sample, is_correct in get_scored_samples(view, filter):
        lengths[not is_correct].append(sample.num_tokens)
    return lengths
