"""Variance components of judgements: problems, answers, judges and wordings.

The model is y = mean + problem + answer + judge + wording + problem x judge + problem x wording +
rest, all of them independent random effects. Answers are nested in problems, and the other factors
are crossed. From the components follow the numbers that an interval of some width needs.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, arg, require_extra

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


def cells(rows: Sequence[tuple[float, object, object, object, object]]) -> Cells:
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
    for place, name in enumerate(names, 1):
        index: dict[object, int] = {}
        levels[name] = np.array([index.setdefault(row[place], len(index)) for row in rows])
    return Cells(np.array([row[0] for row in rows], dtype=np.float64), levels)


def components(values: Cells) -> dict[str, float | None]:
    """Return the variance of each factor and of the rest; None if the design does not determine it.

    The variances are estimated by moments: for each factor, the sum of squares around the means of
    its levels is set equal to its expectation, which is linear in the variances (Henderson 1953,
    method 1, for incomplete designs; Gao and Owen 2017, "Efficient moment calculations for variance
    components in large unbalanced crossed random effects models"). The linear equations are solved
    with all variances at least 0 (Lawson and Hanson's non-negative least squares, from scipy).

    The variance of a factor with a single level is undetermined. If two factors group the values in
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


def predicted_variance(variances: Mapping[str, float | None], design: Design) -> float:
    """Return the variance of the mean in a balanced design.

    Args:
        variances: The variance of each factor; None, for undetermined, counts as 0.
        design: Numbers of problems, answers, judges and wordings.
    """
    n, k, j, w = design.problems, design.answers, design.judges, design.wordings
    over = {
        "problem": n,
        "answer": n * k,
        "judge": j,
        "wording": w,
        "problem x judge": n * j,
        "problem x wording": n * w,
        REST: n * k * j * w,
    }
    return math.fsum((variances[name] or 0.0) / size for name, size in over.items())


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


_MOST: Final = 10**7
_NORMAL: Final = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Need:
    """The required value of one number of a design, if the other numbers stay the same."""

    what: str
    """"problems", "answers" (of a problem), "judges", "wordings" or "repeats"."""
    now: float
    """The present number."""
    needed: int | None
    """The required number; None if no number is enough, or if it is undetermined."""


def check_half_width(half_width: float) -> None:
    """Raise InputError unless the half width is a finite number above 0."""
    is_number = isinstance(half_width, int | float) and not isinstance(half_width, bool)
    if not is_number or not 0 < half_width < math.inf:
        raise InputError(f"{arg('half_width')} must be above 0, got {half_width!r:.80}")


def required_numbers(
    variances: Mapping[str, float | None],
    design: Design,
    half_width: float,
    *,
    repeats: int = 1,
    repeat_variance: float = 0.0,
) -> list[Need]:
    """Return the number of problems, answers and so on for a half width of the 95% interval.

    The half width is 1.96 times the root of the predicted variance of the mean; with few levels the
    reported interval is wider. An undetermined variance counts as 0, so a single judge does not
    determine how many judges are needed.

    Args:
        variances: The variance of each factor; None if undetermined.
        design: The present numbers.
        half_width: Half width of the interval to reach, above 0.
        repeats: Present number of verdicts in each cell.
        repeat_variance: Variance of a verdict around the mean of its cell. It is part of the rest
            in `variances`, where it is divided by `repeats`.

    Returns:
        The required value of each number, if the other numbers stay the same.

    Raises:
        InputError: the half width is not above 0.
    """
    check_half_width(half_width)
    residual = variances[REST] or 0.0
    repeat_variance = min(repeat_variance, residual * repeats)

    def half(design: Design, num_repeats: int) -> float:
        more = residual - repeat_variance / repeats + repeat_variance / num_repeats
        return _NORMAL * math.sqrt(predicted_variance({**variances, REST: more}, design))

    needs = []
    for what in ("problems", "answers", "judges", "wordings", "repeats"):
        now = repeats if what == "repeats" else getattr(design, what)
        factor = {"judges": "judge", "wordings": "wording"}.get(what)
        if factor is not None and variances[factor] is None and now == 1:
            needs.append(Need(what, now, None))
            continue

        def with_number(number: int, what: str = what) -> float:
            if what == "repeats":
                return half(design, number)
            return half(replace(design, **{what: number}), repeats)

        needs.append(Need(what, now, _find_least_number(with_number, half_width)))
    return needs


def _find_least_number(half: Callable[[int], float], half_width: float) -> int | None:
    """Return the smallest sufficient number; None if 10^7 is not enough."""
    numbers = range(1, _MOST + 1)
    place = bisect_left(numbers, True, key=lambda number: half(number) <= half_width)
    return numbers[place] if place < len(numbers) else None
