"""Statistics of pairs of answers: Bradley-Terry strengths of runs, and the effect of order."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, require_extra
from treegen.evals.judging.interval import quantile

_Floats = npt.NDArray[np.float64]

_MAX_STRENGTH: Final = 50.0  # strength, in log-odds, from which an interval counts as having no end
_MAX_STEP: Final = 4.0  # maximum step of Newton's method
_TINY_WIN: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Strength:
    """The strength of a run in pairwise comparison."""

    value: float
    """The strength in log-odds (natural logarithm); the mean over all runs is 0."""
    stderr: float
    """The cluster-robust standard error."""
    low: float | None
    """The lower bound of the 95% interval; None if the pairs do not determine it, as for a run that
    always loses."""
    high: float | None
    """The upper bound of the 95% interval; None if the pairs do not determine it, as for a run that
    always wins."""
    wins: float
    """The share of its pairs that the run wins; ties count half."""


def bradley_terry(
    pairs: Sequence[tuple[str, int, int, float]],
    num_runs: int,
    clusters: Mapping[str, Hashable] | None = None,
) -> list[Strength]:
    """Return the Bradley-Terry strength of each run.

    The strengths maximize the likelihood, fitted by choix (Maystre's library); a tie is half a win
    for each run. As for accuracies, there are two imaginary problems for any two runs that are
    compared, one won by each run. So a run that always wins has a finite strength.

    If a run nearly always wins, this strength is closer to 0 than the true one, and a symmetric
    interval around it misses the truth. The intervals are therefore those of the profile
    likelihood: all strengths at which the logarithm of the likelihood, maximized over the other
    runs' strengths, falls by at most t^2 / 2. An interval spans the one with the imaginary problems
    and the one without, which has no upper end for a run that always wins. The fall is scaled by
    the ratio of the cluster-robust variance, with the problem as the cluster, to that of
    independent pairs. The cluster-robust variance is the inverse of the Hessian on both sides of
    the sum of the problems' squared gradients (Huber 1967; Liang and Zeger 1986). t is the quantile
    of Student's distribution whose degrees of freedom are the number of problems plus one.
    docs/internals/intervals.md lists the coverage.

    With clusters, standard errors and intervals treat each cluster as one problem, with imaginary
    clusters and degrees of freedom as in `mean_interval`. The strengths do not depend on clusters.

    Args:
        pairs: (problem, first run, second run, result of the first run: 1 for a win, 0 for a loss,
            or a value between). Runs are numbered from 0.
        num_runs: Number of runs.
        clusters: The cluster of each problem, if problems are not independent.

    Raises:
        InputError: some runs are not connected to the others by pairs, the strengths cannot be
            fitted, or choix or scipy is not installed.
    """
    with require_extra("strengths need choix", "judge"):
        import choix
    _check_connected(pairs, num_runs)
    problems = dict.fromkeys(pair[0] for pair in pairs)
    cluster_of = {name: name if clusters is None else clusters[name] for name in problems}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(cluster_of.values()))}
    num = len(numbers)
    compared = sorted({(min(a, b), max(a, b)) for _, a, b, _ in pairs})
    cluster_size = sum(size**2 for size in Counter(cluster_of.values()).values()) / len(problems)
    # The weight of a pair of an imaginary cluster.
    size = cluster_size * len(pairs) / len(problems) / len(compared)
    rows = [(numbers[cluster_of[p]], a, b, won, 1.0) for p, a, b, won in pairs]
    added = [(a, b, won) for a, b in compared for won in (1.0, 0.0)]
    rows += [(num + i, a, b, won, size) for i, (a, b, won) in enumerate(added)]
    table = np.array(rows, dtype=np.float64)
    first, second = (table[:, i].astype(np.int64) for i in (1, 2))
    won, weight = table[:, 3], table[:, 4]
    wins = _count_wins(first, second, weight * won, weight * (1 - won), num_runs)
    real = np.arange(len(table)) < len(pairs)
    observed = _count_wins(first[real], second[real], won[real], 1 - won[real], num_runs)
    try:
        theta = values = choix.ilsr_pairwise_dense(wins, max_iter=10_000)
        if cluster_size > 1:  # imaginary clusters would draw the strengths closer to 0
            with_problems = observed + (wins - observed) / cluster_size
            values = choix.ilsr_pairwise_dense(with_problems, max_iter=10_000)
    except RuntimeError as error:
        message = f"the strengths of the runs cannot be fitted: {error}"
        raise InputError(f"{message}; judge more pairs") from None
    covariance, bread = _estimate_covariance(table, theta)
    limit = quantile(0.975, len(problems) / cluster_size + 1)
    strengths = []
    for run in range(num_runs):
        stderr = math.sqrt(float(covariance[run, run]))
        # The ones added to the Hessian contribute 1 / num_runs^2 to its inverse.
        naive = float(bread[run, run]) - 1 / num_runs**2
        fall = limit**2 / 2 * stderr**2 / naive
        without = wins.copy()
        without[run], without[:, run] = observed[run], observed[:, run]
        ends = [_profile(table, theta, run, fall) for table in (wins, without)]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        results = [*won[real & (first == run)], *(1 - won[real & (second == run)])]
        strengths.append(
            Strength(
                float(values[run] - values.mean()),
                stderr,
                low if math.isfinite(low) else None,
                high if math.isfinite(high) else None,
                float(np.mean(results)),
            )
        )
    return strengths


def _count_wins(first: Any, second: Any, won: _Floats, lost: _Floats, num_runs: int) -> _Floats:
    """Return how often each run has won against each other run, `[runs, runs]`.

    Args:
        first: The first run of each pair, `[pairs]`.
        second: The second run of each pair, `[pairs]`.
        won: What the first run has won, `[pairs]`.
        lost: What the second run has won, `[pairs]`.
        num_runs: Number of runs.
    """
    wins = np.zeros((num_runs, num_runs))
    np.add.at(wins, (first, second), won)
    np.add.at(wins, (second, first), lost)
    return wins


def _estimate_covariance(table: _Floats, theta: _Floats) -> tuple[_Floats, _Floats]:
    """Return the cluster-robust covariance of strengths, and the inverse of the Hessian.

    Args:
        table: A row for each pair: its cluster, its runs, the result and the weight.
        theta: The strengths.
    """
    cluster, first, second = (table[:, i].astype(np.int64) for i in range(3))
    won, weight = table[:, 3], table[:, 4]
    num_clusters, num_runs = int(cluster.max()) + 1, len(theta)
    chance = 1 / (1 + np.exp(theta[second] - theta[first]))
    gradient = np.zeros((num_clusters, num_runs))
    np.add.at(gradient, (cluster, first), weight * (won - chance))
    np.add.at(gradient, (cluster, second), weight * (chance - won))
    # Pairs do not determine the sum of all strengths; the added ones fix it at 0.
    hessian = np.full((num_runs, num_runs), 1.0)
    curvature = weight * chance * (1 - chance)
    for a, b in ((first, second), (second, first)):
        np.add.at(hessian, (a, a), curvature)
        np.add.at(hessian, (a, b), -curvature)
    bread = np.linalg.inv(hessian)
    meat = gradient.T @ gradient
    return bread @ meat @ bread * num_clusters / (num_clusters - 1), bread


def _check_connected(pairs: Sequence[tuple[str, int, int, float]], num_runs: int) -> None:
    """Raise InputError if pairs do not connect all runs."""
    reached, before = {0}, -1
    while len(reached) != before:
        before = len(reached)
        reached |= {i for _, a, b, _ in pairs if {a, b} & reached for i in (a, b)}
    if len(reached) < num_runs:
        raise InputError(
            "the judged pairs do not connect all runs, so the runs cannot be ranked together; "
            "judge pairs of all runs"
        )


def _profile(wins: _Floats, start: _Floats, run: int, fall: float) -> tuple[float, float]:
    """Return the strengths at which the profile log-likelihood of a run has fallen by `fall`.

    Args:
        wins: [runs, runs] how often each run has won against each other run.
        start: [runs] initial strengths.
        run: The run whose strength varies, relative to the mean of all runs.
        fall: Fall of the maximum log-likelihood.

    Returns:
        The lowest and the highest strength; infinite if the likelihood never falls so far.
    """
    from scipy.optimize import brentq

    # This tiny share of a win keeps strengths finite if a run always wins, with no visible effect.
    wins = wins + _TINY_WIN * (1 - np.eye(len(wins)))
    theta = _maximize_likelihood(wins, start, run, None)
    middle = float(theta[run] - theta.mean())
    min_log_likelihood = _log_likelihood(wins, theta) - fall

    def find_end(sign: float) -> float:
        last = theta  # the next search starts from the last strengths

        def excess(distance: float) -> float:
            """Return by how much the profile log-likelihood exceeds the limit."""
            nonlocal last
            last = _maximize_likelihood(wins, last, run, middle + sign * distance)
            return _log_likelihood(wins, last) - min_log_likelihood

        distance = 1.0
        while (inside := excess(distance) > 0) and abs(middle + sign * distance) < _MAX_STRENGTH:
            distance *= 2
        if inside:
            return sign * math.inf
        return middle + sign * float(brentq(excess, 0.0, distance, xtol=1e-3))

    return find_end(-1.0), find_end(1.0)


def _log_likelihood(wins: _Floats, theta: _Floats) -> float:
    return -float((wins * np.logaddexp(0, theta[None, :] - theta[:, None])).sum())


def _maximize_likelihood(
    wins: _Floats, start: _Floats, run: int, strength: float | None
) -> _Floats:
    """Return the strengths that maximize the likelihood, by Newton's method.

    Args:
        wins: [runs, runs] how often each run has won against each other run.
        start: [runs] initial strengths.
        run: The run whose strength is fixed.
        strength: The fixed strength, relative to the mean of all runs; None fixes none.

    Returns:
        [runs] the strengths, whose sum is 0.
    """
    num = len(wins)
    free = np.ones(num, dtype=bool)
    theta: _Floats = start - start.mean()
    if strength is not None:
        free[run] = False
        theta = theta + (strength - theta[run]) * np.where(free, -1 / (num - 1), 1.0)
    compared = wins + wins.T
    value = _log_likelihood(wins, theta)
    for _ in range(100):
        chance = 1 / (1 + np.exp(theta[None, :] - theta[:, None]))
        gradient = (wins - compared * chance).sum(axis=1)
        weight = compared * chance * (1 - chance)
        hessian = np.diag(weight.sum(axis=1)) - weight
        # The last row keeps the sum of the free strengths constant.
        size = int(free.sum())
        system = np.ones((size + 1, size + 1))
        system[:size, :size], system[size, size] = hessian[np.ix_(free, free)], 0
        step = np.zeros(num)
        step[free] = np.linalg.solve(system, np.append(gradient[free], 0.0))[:size]
        step *= min(1.0, _MAX_STEP / max(float(np.abs(step).max()), 1e-300))
        while (moved := _log_likelihood(wins, theta + step)) < value - 1e-12:
            step /= 2
        theta = theta + step
        if moved - value < 1e-7 and float(np.abs(step).max()) < 1e-2:
            break
        value = moved
    return theta


@dataclass(frozen=True, slots=True)
class PositionBias:
    """The effect of the order of answers on verdicts."""

    first: float
    """The share of wins of the answer shown first; ties count half. 0.5 means no effect."""
    low: float
    """The lower bound of its 95% interval over problems."""
    high: float
    """The upper bound of its 95% interval over problems."""
    flipped: float
    """The share of pairs whose winner changes with the order."""
    pairs: int
    """Number of pairs that were judged in both orders."""


def estimate_position_bias(
    orders: Mapping[str, Sequence[tuple[float, float]]],
    clusters: Mapping[str, Hashable] | None = None,
) -> PositionBias:
    """Return the effect of the order of answers on verdicts.

    Args:
        orders: For each problem, the results of its pairs: (result of the first run's answer when
            shown first, its result when shown second), from 0 to 1.
        clusters: The cluster of each problem, if problems are not independent.

    Raises:
        InputError: no pair was judged in both orders.
    """
    from treegen.evals.statistics.estimators import mean_interval

    both = {problem: list(pairs) for problem, pairs in orders.items() if pairs}
    if not both:
        raise InputError("no pair was judged in both orders; finish the judging")
    # `a` is a win of the answer shown first. In the other order, the answer shown first won 1 - b.
    firsts = [math.fsum(a + 1 - b for a, b in pairs) / (2 * len(pairs)) for pairs in both.values()]
    names = None if clusters is None else [clusters[problem] for problem in both]
    low, high = mean_interval([min(1.0, max(0.0, share)) for share in firsts], 0.0, 1.0, names)
    flips = [(a - 0.5) * (b - 0.5) < 0 for pairs in both.values() for a, b in pairs]
    return PositionBias(
        math.fsum(firsts) / len(firsts), low, high, sum(flips) / len(flips), len(flips)
    )
