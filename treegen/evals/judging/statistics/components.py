"""Where the spread of judgements comes from: problems, answers, judges, wordings.

The model is y = mean + problem + answer + judge + wording + problem x judge + problem x wording +
rest, all of them independent random effects; answers are nested in problems, and the others are
crossed. The variances are estimated by moments: for each factor the sum of squares about the means
of its levels is set equal to its expectation, which is linear in the variances (Henderson 1953,
method 1, for designs with holes; Gao and Owen 2017, "Efficient moment calculations for variance
components in large unbalanced crossed random effects models"). The linear equations are solved with
no variance below 0 (Lawson and Hanson's non-negative least squares, of scipy).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treegen.errors import InputError, install

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
"""The random effects, and what an observation's level of each is made of."""
REST: Final = "rest"


@dataclass(frozen=True, slots=True)
class Cells:
    """Values from 0 to 1, each with its problem, answer, judge and wording.

    y: float64 [N]. levels: by the name of each of the four, int64 [N], numbered from 0.
    """

    y: Floats
    levels: Mapping[str, Ints]

    def num(self, name: str) -> int:
        """Return how many levels there are of problem, answer (of all problems), judge, wording."""
        return len(np.unique(_levels(self, FACTORS[name])))


def cells(rows: Sequence[tuple[float, object, object, object, object]]) -> Cells:
    """Return cells of (value, problem, answer, judge, wording) rows.

    Raises:
        InputError: there is none.
    """
    if not rows:
        raise InputError(
            "there is no judgement that can be read; `treegen show` has what the judge wrote"
        )
    names = ("problem", "answer", "judge", "wording")
    levels = {}
    for place, name in enumerate(names, 1):
        index: dict[object, int] = {}
        levels[name] = np.array([index.setdefault(row[place], len(index)) for row in rows])
    return Cells(np.array([row[0] for row in rows], dtype=np.float64), levels)


def components(found: Cells) -> dict[str, float | None]:
    """Return the variance of each factor, and of the rest; None where the design cannot tell.

    A factor with one level cannot be told, nor one whose levels are those of another factor, as
    answers are where each problem has one: then the first of them has the variance of both.
    """
    names: list[str] = []
    kept: list[Ints] = []
    for name, parts in FACTORS.items():
        level = _levels(found, parts)
        count = len(np.unique(level))
        if 1 < count < len(found.y) and not any(_same(level, other) for other in kept):
            names.append(name)
            kept.append(level)
    result: dict[str, float | None] = dict.fromkeys((*FACTORS, REST))
    if len(found.y) < 2:
        return result
    groups = [np.zeros(len(found.y), dtype=np.int64), *kept]
    squares = np.array([_within(found.y, group) for group in groups])
    matrix = np.array([[_coefficient(f, g) for g in [*kept, None]] for f in groups])
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise InputError(f"variances need scipy; install it with: {install('judge')}") from None
    scale = matrix.max(axis=1, keepdims=True)
    scale[scale <= 0] = 1.0
    solved, _ = nnls(matrix / scale, squares / scale[:, 0])
    return result | dict(zip([*names, REST], map(float, solved), strict=True))


@dataclass(frozen=True, slots=True)
class Design:
    """How many of each there are: answers of a problem, and verdicts of a cell on average."""

    problems: float
    answers: float
    judges: float
    wordings: float


def design_of(found: Cells) -> Design:
    """Return the design of some cells, answers on average."""
    problems = found.num("problem")
    answers = found.num("answer") / problems
    return Design(problems, answers, found.num("judge"), found.num("wording"))


def predicted_variance(variances: Mapping[str, float | None], design: Design) -> float:
    """Return the variance of the mean of a balanced design; what cannot be told counts as 0."""
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


def _levels(found: Cells, parts: Sequence[str]) -> Ints:
    level = found.levels[parts[0]]
    for name in parts[1:]:
        other = found.levels[name]
        level = level * (int(other.max()) + 1) + other
    _, numbered = np.unique(level, return_inverse=True)
    return numbered.astype(np.int64)


def _same(first: Ints, second: Ints) -> bool:
    """Whether two groupings put the same observations together."""
    num = len(np.unique(first * (int(second.max()) + 1) + second))
    return num == len(np.unique(first)) == len(np.unique(second))


def _within(y: Floats, group: Ints) -> float:
    """Return the sum of squares about the means of groups."""
    counts = np.bincount(group)
    means = np.bincount(group, weights=y) / counts
    return float(((y - means[group]) ** 2).sum())


def _coefficient(group: Ints, effect: Ints | None) -> float:
    """Return by what a variance is multiplied in the expectation of `_within` of a grouping.

    Args:
        effect: The levels of the random effect; None for the rest, whose levels are all different.
    """
    counts = np.bincount(group)
    if effect is None:
        return float(len(group) - len(counts))
    joint = group * (int(effect.max()) + 1) + effect
    pairs, sizes = np.unique(joint, return_counts=True)
    of_group: Any = counts[pairs // (int(effect.max()) + 1)]
    return float(len(group) - (sizes**2 / of_group).sum())
