"""Calibration: how well a number known of a sample predicts that the sample is correct.

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

BINS: Final = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin of samples or problems with similar values of one number."""

    mean: float
    """The mean of that number."""
    right: Estimate
    """The share that is correct, with its interval."""
    num: int
    """How many samples or problems the bin has."""


def bin_values(
    values: Sequence[float], right: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> list[Bin]:
    """Return bins of about equally many values, from low to high; equal values share a bin.

    Args:
        values: The values to divide into bins.
        right: How correct each value's sample is, from 0 to 1.
        clusters: The cluster of each value, if values of one cluster are not independent.
    """
    if not values:
        return []
    num = len(values)
    order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
    ranked = np.asarray(values, dtype=np.float64)[order]
    cuts = {0, num}
    for number in range(1, BINS):
        at = number * num // BINS
        first, last = (int(np.searchsorted(ranked, ranked[at], side)) for side in ("left", "right"))
        cuts.add(first if at - first <= last - at else last)
    bins = []
    for start, stop in pairwise(sorted(cuts)):
        indices = order[start:stop].tolist()
        groups = None if clusters is None else [clusters[i] for i in indices]
        share = estimate([right[i] for i in indices], groups)
        bins.append(Bin(float(ranked[start:stop].mean()), share, len(indices)))
    return bins


def expected_error(bins: Sequence[Bin]) -> float:
    """Return the mean distance between the number and the correct share (Guo et al. 2017)."""
    total = sum(b.num for b in bins)
    return math.fsum(abs(b.mean - b.right.value) * b.num for b in bins) / total


def token_probability(sample: Sample) -> float | None:
    """Return the geometric mean of the probabilities of a sample's tokens, if it is known."""
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


def by_probability(view: RunView, filter: str) -> list[Bin]:
    """Return the share of correct samples, in bins of the mean probability of their tokens."""
    return _bin_samples(
        view,
        [
            (value, right, sample)
            for sample, right in get_scored_samples(view, filter)
            if (value := token_probability(sample)) is not None
        ],
    )


def by_tokens(view: RunView, filter: str) -> list[Bin]:
    """Return the share of correct samples, in bins of their number of tokens."""
    scored = get_scored_samples(view, filter)
    return _bin_samples(view, [(sample.num_tokens, right, sample) for sample, right in scored])


def _bin_samples(view: RunView, rows: Sequence[tuple[float, bool, Sample]]) -> list[Bin]:
    """Return bins of samples, whose clusters are their problems or the problems' groups."""
    values, right = [value for value, _, _ in rows], [float(right) for _, right, _ in rows]
    problem_ids = [sample.problem_id for _, _, sample in rows]
    return bin_values(values, right, clusters_of(view.problems, problem_ids) or problem_ids)


def compute_within_problem_auc(view: RunView, filter: str) -> Estimate | None:
    """Return how often the likelier of a problem's correct and wrong samples is the correct one.

    The likelier sample has the higher mean probability of tokens; equal ones count half. It is a
    mean over the problems that have both; None if no problem has.
    """
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for sample, right in get_scored_samples(view, filter):
        if (value := token_probability(sample)) is not None:
            groups.setdefault(sample.problem_id, ([], []))[right].append(value)
    shares, ids = [], []
    for problem_id, (wrong, rights) in groups.items():
        if wrong and rights:
            difference = np.subtract.outer(np.array(rights), np.array(wrong))
            shares.append(float(((difference > 0) + 0.5 * (difference == 0)).mean()))
            ids.append(problem_id)
    return estimate(shares, clusters_of(view.problems, ids)) if shares else None


@dataclass(frozen=True, slots=True)
class ProblemPoint:
    """A problem as a point of a plot."""

    index: int
    """Its number in the run."""
    right: float
    """The share of its samples that is correct."""
    top: float
    """The share of the answer with most votes."""
    vote: float
    """How correct its vote is, from 0 to 1; tied answers count by their shares."""
    tokens: float
    """The mean number of tokens of a sample."""


def problem_points(view: RunView, filter: str) -> list[ProblemPoint]:
    """Return a point for each scored problem of a run."""
    verdicts = view.verdicts(filter)
    points = []
    for index, problem in enumerate(view.problems):
        if not (of_problem := verdicts.get(problem.id)):
            continue
        votes = tally(of_problem)
        num = len(of_problem)
        tokens = [s.num_tokens for s in problem.samples if s.verdict(filter) is not None]
        points.append(
            ProblemPoint(
                index=index,
                right=sum(verdict.correct for verdict in of_problem) / num,
                top=max((*votes.correct, *votes.wrong), default=0) / num,
                vote=votes.maj_at_k(num),
                tokens=fmean(tokens),
            )
        )
    return points


def lengths_by_right(view: RunView, filter: str) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens of correct and of wrong samples."""
    lengths: tuple[list[int], list[int]] = ([], [])
    for sample, right in get_scored_samples(view, filter):
        lengths[not right].append(sample.num_tokens)
    return lengths
