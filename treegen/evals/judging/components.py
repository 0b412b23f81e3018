"""Variance components of judgements: problems, answers, judges and wordings.

The model is y = mean + problem + answer + judge + wording + problem x judge + problem x wording +
rest, all of them independent random effects. Answers are nested in problems, and the other factors
are crossed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, require_extra

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "problem": ("problem",),
    "answer": ("problem", "answer"),
    "judge": ("judge",),
    "wording": ("wording",),
    "problem x judge": ("problem", "judge"),
    "problem x wording": ("problem", "wording"),
}
"""The random effects, and the fields of an observation that identify its level of each."""
REST: Final = "rest"


@dataclass(frozen=True, slots=True)
class Cells:
    """Values from 0 to 1, each with its problem, answer, judge and wording."""

    y: Floats
    """float64 [N], the values."""
    levels: Mapping[str, Ints]
    """int64 [N] for each of "problem", "answer", "judge" and "wording", numbered from 0."""

    def num(self, name: str) -> int:
        """Return the number of levels of a factor; answers are counted over all problems."""
        return len(np.unique(_levels(self, FACTORS[name])))


def make_cells(rows: Sequence[tuple[float, object, object, object, object]]) -> Cells:
    """Return the cells of (value, problem, answer, judge, wording) rows.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError(
            "no verdict could be read from the output of the judge; use `treegen show` to see "
            "the output"
        )
    names = ("problem", "answer", "judge", "wording")
    levels = {}
    for column, name in enumerate(names, 1):
        index: dict[object, int] = {}
        levels[name] = np.array([index.setdefault(row[column], len(index)) for row in rows])
    return Cells(np.array([row[0] for row in rows], dtype=np.float64), levels)


def estimate_components(values: Cells) -> dict[str, float | None]:
    """Return the variance of each factor and of the rest; None if the design does not determine it.

    The variances are estimated by moments: for each factor, the sum of squares around the means of
    its levels is set equal to its expectation, which is linear in the variances (Henderson 1953,
    method 1, for incomplete designs; Gao and Owen 2017, "Efficient moment calculations for variance
    components in large unbalanced crossed random effects models"). The linear equations are solved
    with all variances at least 0 (Lawson and Hanson's non-negative least squares, from scipy).

    The variance of a factor with a single level is undetermined, and so is that of a factor with a
    level for each value, because the residual is then the same. If two factors group the values in
    the same way, such as problems and answers with one answer per problem, the first of them gets
    the variance of both.
    """
    names: list[str] = []
    distinct: list[Ints] = []
    for name, parts in FACTORS.items():
        level = _levels(values, parts)
        count = len(np.unique(level))
        if 1 < count < len(values.y) and not any(
            _are_equal_groupings(level, other) for other in distinct
        ):
            names.append(name)
            distinct.append(level)
    result: dict[str, float | None] = dict.fromkeys((*FACTORS, REST))
    if len(values.y) < 2:
        return result
    groups = [np.zeros(len(values.y), dtype=np.int64), *distinct]
    squares = np.array([_sum_squares_within(values.y, group) for group in groups])
    matrix = np.array([[_coefficient(f, g) for g in [*distinct, None]] for f in groups])
    with require_extra("variances need scipy", "judge"):
        from scipy.optimize import nnls
    scale = matrix.max(axis=1, keepdims=True)
    scale[scale <= 0] = 1.0
    solved, _ = nnls(matrix / scale, squares / scale[:, 0])
    return result | dict(zip([*names, REST], map(float, solved), strict=True))


@dataclass(frozen=True, slots=True)
class Design:
    """Numbers of problems, answers of a problem, judges and wordings."""

    problems: float
    answers: float
    judges: float
    wordings: float


def design_of(values: Cells) -> Design:
    """Return the design of cells, with the mean number of answers of a problem."""
    problems = values.num("problem")
    answers = values.num("answer") / problems
    return Design(problems, answers, values.num("judge"), values.num("wording"))


def _levels(values: Cells, parts: Sequence[str]) -> Ints:
    level = values.levels[parts[0]]
    for name in parts[1:]:
        other = values.levels[name]
        level = level * (int(other.max()) + 1) + other
    _, numbered = np.unique(level, return_inverse=True)
    return numbered.astype(np.int64)


def _are_equal_groupings(first: Ints, second: Ints) -> bool:
    """Return whether two groupings of observations are the same."""
    num = len(np.unique(first * (int(second.max()) + 1) + second))
    return num == len(np.unique(first)) == len(np.unique(second))


def _sum_squares_within(y: Floats, group: Ints) -> float:
    """Return the sum of squares around the means of groups."""
    counts = np.bincount(group)
    means = np.bincount(group, weights=y) / counts
    return float(((y - means[group]) ** 2).sum())


def _coefficient(group: Ints, effect: Ints | None) -> float:
    """Return the coefficient of a variance in the expectation of `_sum_squares_within`.

    Args:
        group: [N] the group of each observation.
        effect: [N] the level of the random effect; None for the rest, whose levels all differ.
    """
    counts = np.bincount(group)
    if effect is None:
        return float(len(group) - len(counts))
    joint = group * (int(effect.max()) + 1) + effect
    pairs, sizes = np.unique(joint, return_counts=True)
    of_group: Any = counts[pairs // (int(effect.max()) + 1)]
    return float(len(group) - (sizes**2 / of_group).sum())
