"""Simulated runs whose true difference is known, and how often intervals of differences hold it.

Run from the root of the repository, this prints the tables of docs/internals/intervals.md:

    PYTHONPATH=. python tests/interval_grids.py
"""
# ruff: noqa: T201

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from treegen.evals.statistics.estimators import adjusted_rows, imaginary_distance

Floats = npt.NDArray[np.float64]
Bounds = tuple[Floats, Floats]

CHANGES: Final = ("same", "noise", "shift", "leap", "half")
HARD: Final = (
    (0.02, 0.98),
    (0.98, 0.02),
    (0.05, 0.05),
    (0.3, 0.7),
    (0.4, 8.0),
    (8.0, 0.4),
    (1.0, 1.0),
    (20.0, 20.0),
)
KINDS: Final = ("equal", "ragged", "halves", "giant")
MODELS: Final = ("problems", "chances", "outcomes", "mixed")


def sizes_of(kind: str, num: int, mean: int) -> list[int]:
    """Sizes of clusters: equal, from 1 to twice the mean, or each half of the one before."""
    if kind == "equal":
        return [mean] * num
    if kind == "ragged":
        return [max(1, round(each)) for each in np.linspace(1, 2 * mean - 1, num).tolist()]
    if kind == "halves":
        return [max(1, round(mean * num / 2**i)) for i in range(1, num + 1)]
    return [max(1, mean * num // 2), *[1] * (num - 1)]


def chances_of(
    rng: np.random.Generator, a: float, b: float, change: str, shape: int | tuple[int, int]
) -> tuple[Floats, Floats]:
    """Chances of a right sample in two runs, of problems as hard as a Beta distribution says."""
    first = rng.beta(a, b, shape)
    inner = np.clip(first, 1e-6, 1 - 1e-6)
    odds = np.log(inner / (1 - inner))
    noise = rng.standard_normal(shape)
    second = {
        "same": first,
        "noise": 1 / (1 + np.exp(-odds - 0.5 * noise)),
        "shift": 1 / (1 + np.exp(-odds - 0.5 - 0.3 * noise)),
        "leap": 1 / (1 + np.exp(-odds - 2 - 0.5 * noise)),
        "half": first + 0.5 * (1 - first),
    }[change]
    return first, np.clip(second, 0, 1)


@cache
def truth_of(a: float, b: float, change: str) -> float:
    """The mean difference of the chances."""
    if change == "same":
        return 0.0
    first, second = chances_of(np.random.default_rng(0), a, b, change, 400_000)
    return float((second - first).mean())


def shares_less(rng: np.random.Generator, pair: tuple[Floats, Floats], num_samples: int) -> Floats:
    """The differences of the shares of right samples."""
    first, second = (rng.binomial(num_samples, each) for each in pair)
    difference: Floats = (second - first) / num_samples
    return difference


def clustered(
    rng: np.random.Generator,
    a: float,
    b: float,
    change: str,
    num_samples: int,
    sizes: Sequence[int],
    model: str,
    rounds: int,
) -> Floats:
    """Differences of problems in clusters; one row for each round.

    Args:
        model: what problems of a cluster share: nothing ("problems"), the chances of a right sample
            ("chances"; "mixed" if half of the problems do), or the samples too ("outcomes").
    """
    shape = (rounds, len(sizes))
    if model == "outcomes":
        return np.repeat(
            shares_less(rng, chances_of(rng, a, b, change, shape), num_samples), sizes, axis=1
        )
    own = chances_of(rng, a, b, change, (rounds, sum(sizes)))
    if model == "problems":
        return shares_less(rng, own, num_samples)
    first, second = (np.repeat(x, sizes, axis=1) for x in chances_of(rng, a, b, change, shape))
    if model == "mixed":
        joint = rng.random(own[0].shape) < 0.5
        first, second = np.where(joint, first, own[0]), np.where(joint, second, own[1])
    return shares_less(rng, (first, second), num_samples)


@dataclass
class Cell:
    """Intervals of one cell of a grid.

    held: how often each method's interval holds the truth. width: its mean width.
    """

    name: tuple[object, ...]
    held: dict[str, float] = field(default_factory=dict)
    width: dict[str, float] = field(default_factory=dict)

    def add(self, method: str, bounds: Bounds, truth: float) -> None:
        low, high = bounds
        held = (low <= truth + 1e-9) & (truth - 1e-9 <= high)
        self.held[method], self.width[method] = float(held.mean()), float((high - low).mean())


def _bounds(center: Floats, error: Floats, freedom: float) -> Bounds:
    half = stats.t.ppf(0.975, freedom) * error
    return np.maximum(-1, center - half), np.minimum(1, center + half)


def after(differences: Floats, sizes: Sequence[int] | None = None) -> Bounds:
    """The intervals that treegen reports; those of clusters are `adjusted_difference` of each row.

    They are computed for all rows at once here, which a test compares with the single ones.
    """
    if sizes is None:
        return _bounds(*adjusted_rows(differences))
    size = np.array(sizes, dtype=np.float64)
    sums = np.add.reduceat(differences, np.cumsum([0, *sizes[:-1]]), axis=1)
    total, num = float(size.sum()), len(size)
    usual = float((size**2).sum()) / total
    mean, means = sums.sum(axis=1) / total, sums / size
    between = (size * (means - mean[:, None]) ** 2).sum(axis=1) / (num - 1)
    squares = (differences**2).sum(axis=1) - (size * means**2).sum(axis=1)
    within = np.maximum(0, squares) / (total - num)
    variance = between + ((total - usual) / (num - 1) - 1) * within
    varies = variance > 1e-12
    alike = np.where(varies, np.clip((between - within) / np.where(varies, variance, 1), 0, 1), 1.0)
    alike = alike[:, None]
    scale = np.sqrt((alike + (1 - alike) / usual) / (alike + (1 - alike) / size))
    far = imaginary_distance((means - mean[:, None]) * scale, 1 + np.abs(mean), total / usual)
    low, high = np.maximum(-1, mean - far), np.minimum(1, mean + far)
    weight = total + 2 * usual
    center = (sums.sum(axis=1) + usual * (low + high)) / weight
    residuals = ((sums - center[:, None] * size) ** 2).sum(axis=1)
    residuals += usual**2 * ((low - center) ** 2 + (high - center) ** 2)
    error = np.sqrt(residuals * (num + 2) / (num + 1)) / weight
    return _bounds(center, error, total / usual + 1)


def student(differences: Floats, sizes: Sequence[int] | None = None) -> Bounds:
    """Student's t, of clusters with the error of the jackknife. It misses where few differ."""
    size = np.array(sizes or [1] * differences.shape[1])
    sums = np.add.reduceat(differences, np.cumsum([0, *size[:-1]]), axis=1)
    total, num = size.sum(), len(size)
    mean = sums.sum(axis=1) / total
    moves = (sums - mean[:, None] * size) / (total - size)
    error = np.sqrt((moves**2).sum(axis=1) * (num - 1) / num)
    return _bounds(mean, error, max(1.0, total**2 / (size**2).sum() - 1))


def before(differences: Floats, sizes: Sequence[int] | None = None) -> Bounds:
    """Imaginary differences of -d and d, with d at least 3 / m: what treegen reported before."""
    size = np.array(sizes or [1] * differences.shape[1])
    sums = np.add.reduceat(differences, np.cumsum([0, *size[:-1]]), axis=1)
    squares, fourths = (sums**2).sum(axis=1), (sums**4).sum(axis=1)
    share = 3 * fourths / np.where(squares > 0, squares**2, 1)
    far = np.minimum(1, np.maximum(np.abs(sums / size).max(axis=1), share))
    far = np.where(squares > 0, far, 1.0)
    usual = float((size**2).sum() / size.sum())
    total, num = float(size.sum()) + 2 * usual, len(size) + 2
    center = sums.sum(axis=1) / total
    residuals = ((sums - center[:, None] * size) ** 2).sum(axis=1)
    residuals += usual**2 * ((far - center) ** 2 + (far + center) ** 2)
    error = np.sqrt(residuals * num / (num - 1)) / total
    return _bounds(center, error, size.sum() / usual + 1)


Method = Callable[[Floats, Sequence[int] | None], Bounds]
METHODS: Final[Mapping[str, Method]] = {"t": student, "before": before, "after": after}


def pairs_grid(
    num: int,
    rounds: int,
    samples: Sequence[int],
    methods: Mapping[str, Method] = METHODS,
    hard: Sequence[tuple[float, float]] = HARD,
) -> Iterator[Cell]:
    """Simulate differences of independent problems."""
    rng = np.random.default_rng(num)
    for (a, b), change, num_samples in itertools.product(hard, CHANGES, samples):
        rows = shares_less(rng, chances_of(rng, a, b, change, (rounds, num)), num_samples)
        cell = Cell((num, a, b, change, num_samples))
        for name, method in methods.items():
            cell.add(name, method(rows, None), truth_of(a, b, change))
        yield cell


def clusters_grid(
    kind: str,
    num: int,
    models: Iterable[str],
    rounds: int,
    samples: Sequence[int] = (1, 8, 64),
    methods: Mapping[str, Method] = METHODS,
    hard: Sequence[tuple[float, float]] = HARD,
) -> Iterator[Cell]:
    """Simulate differences of problems in clusters of ten in the mean."""
    rng = np.random.default_rng(num)
    sizes = sizes_of(kind, num, 10)
    for model, (a, b), change, k in itertools.product(models, hard, CHANGES, samples):
        rows = clustered(rng, a, b, change, k, sizes, model, rounds)
        cell = Cell((kind, num, model, a, b, change, k))
        for name, method in methods.items():
            cell.add(name, method(rows, sizes), truth_of(a, b, change))
        yield cell


def summary(label: str, cells: Sequence[Cell]) -> str:
    """One line of a table: the least coverage, and the widths beside those of Student's t."""
    like_t = [cell for cell in cells if 0.93 <= cell.held["t"] <= 0.97]
    parts = [label, f"{min(cell.held['t'] for cell in cells):.3f}"]
    for name in ("before", "after"):
        parts.append(f"{min(cell.held[name] for cell in cells):.3f}")
        ratios = [cell.width[name] / cell.width["t"] for cell in like_t]
        parts += [f"{np.quantile(ratios, share):.2f}" for share in (0.5, 0.9)]
    means = [float(np.mean([cell.width[name] for cell in cells])) for name in ("before", "after")]
    return f"| {' | '.join([*parts, f'{means[1] / means[0]:.2f}'])} |"


_HEAD: Final = """\
| {} | t: least | before: least | width / t | 9 of 10 | after: least | width / t | 9 of 10 | \
after / before |
|---|---|---|---|---|---|---|---|---|"""


def _print_tables() -> None:
    print(_HEAD.format("Problems"))
    for num in (2, 3, 5, 7, 10, 15, 20, 50, 100, 300):
        print(summary(str(num), list(pairs_grid(num, 1000, (1, 2, 8, 64)))), flush=True)
    print("\n" + _HEAD.format("Clusters"))
    for kind in KINDS:
        for num in (3, 5, 10, 30):
            cells = list(clusters_grid(kind, num, MODELS, 150))
            print(summary(f"{num} {kind}", cells), flush=True)


if __name__ == "__main__":
    _print_tables()
