"""Posterior draws of the next score, for Thompson sampling.

`draw_gaussian` and `draw_beta` use scores of one kind. `draw_mixed` uses groups of similar scores:
scores of one group also inform the draws of other groups, and of a new group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist, fmean
from typing import Final

import numpy as np

from treegen.common.checks import check_argument_types
from treegen.errors import InputError

Draw = Callable[[Sequence[float], random.Random], float]
"""Draws the mean of some scores from its posterior; from its prior if there are no scores."""

# Priors of Inoue et al. 2025. The mean is N(M, s^2 / KAPPA), where s^2 has the scaled inverse
# chi-squared distribution of NU and TAU2. A and B are Jeffreys' prior for scores from 0 to 1.
M, KAPPA, NU, TAU2 = 0.0, 1.0, 1.0, 0.1
A, B = 0.5, 0.5
# Priors of the mixed model.
MEAN, MEAN_SCALE, GROUP_SCALE, NOISE_SCALE = 0.5, 0.2, 0.2, 0.3
_POINTS: Final = 16


@check_argument_types
def draw_gaussian(scores: Sequence[float], rng: random.Random) -> float:
    """Draw a mean, for normal scores of unknown mean and variance."""
    n = len(scores)
    mean = fmean(scores) if scores else 0.0
    kappa, nu = KAPPA + n, NU + n
    spread = math.fsum((score - mean) ** 2 for score in scores)
    spread += NU * TAU2 + n * KAPPA * (M - mean) ** 2 / kappa
    variance = spread / rng.gammavariate(nu / 2, 2.0)
    return rng.gauss((KAPPA * M + n * mean) / kappa, math.sqrt(variance / kappa))


@check_argument_types
def draw_beta(scores: Sequence[float], rng: random.Random) -> float:
    """Draw a mean, for scores that are success rates of one trial each.

    Args:
        scores: Scores from 0 to 1.
        rng: Source of randomness.

    Raises:
        InputError: A score is not from 0 to 1.
    """
    if not all(0 <= score <= 1 for score in scores):
        raise InputError(f"the beta rule takes values from 0 to 1, got {list(scores)}; scale them")
    won = math.fsum(scores)
    return rng.betavariate(A + won, B + len(scores) - won)


@check_argument_types
def draw_mixed(groups: Sequence[Sequence[float]], num: int, rng: random.Random) -> list[float]:
    """Draw the next score of each group, and then of `num` groups without scores.

    The model: score = a + noise, with a ~ N(mu, group_scale^2) for each group, noise ~ N(0,
    noise_scale^2), mu ~ N(MEAN, MEAN_SCALE^2), and the two scales half-normal. Given the scales,
    everything else is normal and is integrated exactly. The scales themselves are on a grid of 16 x
    16 points, the midpoints of equally likely parts of their priors, so there is no Markov chain
    that has to mix. Each draw is from the posterior predictive distribution, independent of the
    other draws.

    Args:
        groups: Scores of each group, at least one per group.
        num: Groups without scores.
        rng: Source of randomness.

    Raises:
        InputError: A group has no scores.
    """
    if not all(len(group) for group in groups):
        raise InputError("each group needs at least one score")
    sizes = np.array([len(group) for group in groups], dtype=float)
    means = np.array([fmean(group) for group in groups])
    spreads = math.fsum(
        (score - mean) ** 2 for group, mean in zip(groups, means, strict=True) for score in group
    )
    group_var, noise_var = _grid()
    variances = group_var[:, None] + noise_var[:, None] / sizes  # variances of the groups' means
    precision = 1 / MEAN_SCALE**2 + (1 / variances).sum(axis=1)
    centre = (MEAN / MEAN_SCALE**2 + (means / variances).sum(axis=1)) / precision
    distance = ((means - MEAN) ** 2 / variances).sum(axis=1)
    distance -= precision * (centre - MEAN) ** 2
    evidence = -0.5 * (
        np.log(variances).sum(axis=1)
        + np.log(precision)
        + distance
        + spreads / noise_var
        + (sizes - 1).sum() * np.log(noise_var)
    )
    weights = np.exp(evidence - evidence.max()).cumsum()

    def draw(size: float, mean: float) -> float:
        point = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        point = min(point, len(weights) - 1)
        between, noise = float(group_var[point]), float(noise_var[point])
        mu = rng.gauss(float(centre[point]), 1 / math.sqrt(float(precision[point])))
        share = 1 / (1 / between + size / noise)
        group_mean = rng.gauss(share * (mu / between + size * mean / noise), math.sqrt(share))
        return rng.gauss(group_mean, math.sqrt(noise))

    known = [draw(float(n), float(mean)) for n, mean in zip(sizes, means, strict=True)]
    return known + [draw(0.0, 0.0) for _ in range(num)]


@cache
def _grid() -> tuple[np.ndarray, np.ndarray]:
    """Return the variances between groups and of the noise, at all points of the grid."""
    half = [NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * _POINTS)) for i in range(_POINTS)]
    between, noise = np.meshgrid(GROUP_SCALE * np.array(half), NOISE_SCALE * np.array(half))
    return between.ravel() ** 2, noise.ravel() ** 2
