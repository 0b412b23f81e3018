"""Intervals for means of judgements that account for problems, judges and wordings.

The usual standard error treats judge and wording as fixed. Here each factor with several levels
adds the variance of the mean over its levels:

    V = V_problem + V_judge + V_wording,  V_f = s^2(means of the levels of f) / (levels of f)
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
"""The confidence level of the quantiles for judges and wordings."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of judgements with its interval.

    value: the mean over problems of the means of their answers, from 0 to 1.
    stderr: the standard error, including judges and wordings; None for a single problem.
    low, high: the bounds of the 95% interval.
    naive: the standard error over problems only, with judges and wordings treated as fixed.
    given: the factors with a single level, which the interval treats as fixed.
    low_given, high_given: the bounds of the 95% interval for these judges and wordings only.
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
    """Return the mean of cells with its interval.

    The variance is the sum over problems, judges and wordings in the docstring of the module. Each
    of the three parts includes a residual, so the sum is too large rather than too small; for the
    balanced two-way design, the sum minus that residual is the usual estimate (Brennan 2001,
    "Generalizability Theory"). Problems count as in `treegen.evals.statistics.estimators`: with two
    imaginary problems, and by cluster.

    Each part has its own quantile of Student's t with its own degrees of freedom, and the half
    width is the root of the sum of (t_f^2 V_f). Banerjee (1961) shows that the coverage is at least
    the nominal one. Satterthwaite's joint degrees of freedom give narrower intervals, whose
    coverage drops to 0.82 if two judges differ much. Student's quantiles are for normal effects.
    For judges and wordings, which are few, the 96% quantiles are used, so that uniform effects have
    a coverage of 0.93 too (0.92 with 95% quantiles and two or three levels). A factor with a single
    level, such as one judge, is treated as fixed, and the interval holds for this level only.
    tests/evals/judging/test_grading_statistics.py simulates the coverage in docs/judging.md.

    Args:
        found: The values, with problem, answer, judge and wording.
        clusters: The cluster of each problem, by number, if problems are not independent; empty
            for a problem without a cluster.

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
    """Return the mean of each level of a factor, with equal weights for problems.

    The mean of a level without cells of some problems is over the problems that it has.
    """
    level, problem = found.levels[name], found.levels["problem"]
    num = int(problem.max()) + 1
    joint = level * num + problem
    pairs, place = np.unique(joint, return_inverse=True)
    means = np.bincount(place, weights=found.y) / np.bincount(place)
    of_level = pairs // num
    sums = np.bincount(of_level, weights=means) / np.bincount(of_level)
    return [float(mean) for mean in sums]
