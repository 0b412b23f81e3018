"""Intervals of the mean that other problems, other judges and other wordings would move too.

The usual standard error takes judge and wording as given. Here each factor that has several levels
adds the variance of the mean over its levels:

    V = V_problem + V_judge + V_wording,  V_f = s^2(means of the levels of f) / (levels of f)

A residual is in each of the three, so V is too large rather than too small; for the balanced
two-way design V less that residual is the usual estimate (Brennan 2001, "Generalizability Theory").
Problems count as in `treegen.evals.statistics.estimators`: with two imaginary ones, or by cluster.
Each part has its own quantile of Student's t, by its own degrees of freedom, and the half width is
the root of the sum of (t_f^2 V_f). Banerjee (1961) shows that the coverage is at least what it is
called. Satterthwaite's joint degrees of freedom give narrower intervals, which cover as little as
0.82 where two judges differ much. Student's quantiles are for normal effects; those of judges and
wordings, which are few, are taken at 96%, so that uniform effects are covered at 0.93 too (two or
three levels: 0.92 at 95%). What has one level alone, such as a single judge, is taken as given, and
the interval is for it.

The table in docs/judging.md is from tests/evals/judging/test_grading_statistics.py, which simulates
it.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from treegen.errors import InputError, install
from treegen.evals.judging.statistics.components import Cells
from treegen.evals.statistics.estimators import adjusted_mean, standard_error

CONFIDENCE: Final = 0.95
OF_FEW: Final = 0.96
"""The level of the quantiles of judges and wordings."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of judgements with its interval.

    value: the mean over problems of the means of their answers, from 0 to 1.
    stderr: with judges and wordings; None for a single problem.
    low, high: of the 95% interval.
    naive: the standard error of problems alone, as if judge and wording were all there are.
    given: the factors of one level, for which alone the interval is.
    low_given, high_given: of the 95% interval for these very judges and wordings.
    """

    value: float
    stderr: float | None
    low: float
    high: float
    naive: float | None
    given: tuple[str, ...]
    low_given: float
    high_given: float


def mean_of(found: Cells, clusters: Mapping[int, str] | None = None) -> Mean:
    """Return the mean of some cells with its interval.

    Args:
        clusters: Of each problem's number, where problems are not independent.

    Raises:
        InputError: scipy is not installed.
    """
    by_problem = _means(found, "problem")
    numbers = range(len(by_problem))
    groups: Sequence[Hashable] | None = None
    if clusters is not None and any(clusters.values()):
        groups = [clusters.get(i) or ("alone", i) for i in numbers]
    value = math.fsum(by_problem) / len(by_problem)
    adjusted = adjusted_mean(by_problem, 0.0, 1.0, groups)
    halves = [quantile(0.5 + CONFIDENCE / 2, adjusted.freedom) * adjusted.error]
    few = []
    given = []
    for name in ("judge", "wording"):
        means = _means(found, name)
        if len(means) < 2:
            given.append(name)
            continue
        few.append(float(np.var(means, ddof=1)) / len(means))
        halves.append(quantile(0.5 + OF_FEW / 2, len(means) - 1.0) * math.sqrt(few[-1]))
    half, alone = math.hypot(*halves), halves[0]
    naive = standard_error(by_problem, groups)
    stderr = None if naive is None else math.sqrt(naive**2 + math.fsum(few))
    return Mean(
        value=min(1.0, max(0.0, value)),
        stderr=stderr,
        low=max(0.0, min(value, adjusted.center - half)),
        high=min(1.0, max(value, adjusted.center + half)),
        naive=naive,
        given=tuple(given),
        low_given=max(0.0, min(value, adjusted.center - alone)),
        high_given=min(1.0, max(value, adjusted.center + alone)),
    )


def quantile(share: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution."""
    try:
        from scipy.stats import t
    except ImportError:
        raise InputError(f"intervals need scipy; install it with: {install('judge')}") from None
    return float(t.ppf(share, freedom))


def _means(found: Cells, name: str) -> list[float]:
    """Return the mean of each level of a factor; each problem has one weight in it.

    So a level that lacks cells of some problems is the mean over those that it has.
    """
    level, problem = found.levels[name], found.levels["problem"]
    num = int(problem.max()) + 1
    joint = level * num + problem
    pairs, place = np.unique(joint, return_inverse=True)
    means = np.bincount(place, weights=found.y) / np.bincount(place)
    of_level = pairs // num
    sums = np.bincount(of_level, weights=means) / np.bincount(of_level)
    return [float(each) for each in sums]
