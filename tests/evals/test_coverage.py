"""How often 95% intervals hold the truth: simulated over grids of sizes, correlations and means."""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from interval_grids import (
    CHANGES,
    HARD,
    KINDS,
    MODELS,
    after,
    chances_of,
    clusters_grid,
    pairs_grid,
    shares_less,
    sizes_of,
    student,
)
from interval_grids import clustered as clustered_differences
from scipy import stats

from treegen.evals.statistics.estimators import (
    adjusted_difference,
    adjusted_rows,
    difference_interval,
    mean_interval,
    mean_of_means,
    standard_error,
    unbounded_error,
)

_Floats = npt.NDArray[np.float64]
_MIN_COVERAGE = 0.93


def share_held(intervals: list[tuple[float, float]], truth: float | _Floats) -> float:
    low, high = np.array(intervals).T
    return float(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).mean())


def least_allowed(rounds: int) -> float:
    """What a method that covers 0.93 is simulated above, but for one grid cell in a thousand."""
    return _MIN_COVERAGE - 3.1 * float(np.sqrt(_MIN_COVERAGE * (1 - _MIN_COVERAGE) / rounds))


def test_t_is_students() -> None:
    from treegen.evals.statistics.estimators import AdjustedMean

    for freedom in (2, 2.5, 3, 4.7, 10, 33, 1000, 1e6):
        low, high = AdjustedMean(0.0, 1.0, freedom).interval(-100, 100)
        assert high == -low == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


# Clusters


def chances(
    rng: np.random.Generator, mean: float, correlation: float, shape: int | tuple[int, int]
) -> _Floats:
    """Chances of a right answer in clusters: of a mean, and of a correlation within."""
    if correlation == 0:
        return np.full(shape, mean)
    if correlation == 1:
        return np.asarray(rng.random(shape) < mean, dtype=np.float64)
    strength = 1 / correlation - 1
    return np.asarray(rng.beta(mean * strength, (1 - mean) * strength, shape), dtype=np.float64)


def clustered(
    rng: np.random.Generator, sizes: list[int], mean: float, correlation: float, rounds: int
) -> Iterator[list[float]]:
    """Yield right and wrong problems, cluster after cluster."""
    rates = chances(rng, mean, correlation, (rounds, len(sizes)))
    for row in np.repeat(rates, sizes, axis=1):
        yield (rng.random(len(row)) < row).astype(np.float64).tolist()


def check_clusters(
    kind: str, nums: list[int], means: list[int], rates: list[float], rounds: int
) -> None:
    rng = np.random.default_rng(len(kind))
    correlations = (0.0, 0.2, 0.9, 1.0)
    for num, size, rate, correlation in itertools.product(nums, means, rates, correlations):
        sizes = sizes_of(kind, num, size)
        names = np.repeat(np.arange(num), sizes).tolist()
        found = [
            mean_interval(values, 0, 1, names)
            for values in clustered(rng, sizes, rate, correlation, rounds)
        ]
        held = share_held(found, rate)
        assert held >= least_allowed(rounds), (num, size, rate, correlation, held)


@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_few_strongly_correlated_clusters_are_covered(kind: str) -> None:
    """Two clusters of ten, and five at a mean of 0.09, where a plain count of problems misses."""
    check_clusters(kind, [2, 5], [10], [0.09, 0.5], 500)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["equal", "ragged", "halves", "giant"])
def test_any_clusters_are_covered(kind: str) -> None:
    check_clusters(kind, [2, 3, 5, 10, 30], [2, 10], [0.02, 0.09, 0.2, 0.5, 0.95], 400)


def test_equal_clusters_of_one_and_none_are_the_same() -> None:
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    assert mean_interval(values, 0, 1, "abcde") == pytest.approx(mean_interval(values, 0, 1))
    pairs = [value - 0.5 for value in values]
    assert difference_interval(pairs, "abcde") == pytest.approx(difference_interval(pairs))
    assert mean_interval(values, 0, 1, "aaaaa")[0] < 0.05


# Paired differences


@pytest.mark.soak
@pytest.mark.parametrize("num", [2, 3, 4, 5, 7, 10, 15, 20, 50, 100, 300])
def test_paired_differences_are_covered(num: int) -> None:
    rounds = 1000
    cells = list(pairs_grid(num, rounds, (1, 2, 8, 64), {"after": after}))
    assert len(cells) == len(HARD) * len(CHANGES) * 4
    for cell in cells:
        assert cell.held["after"] >= least_allowed(rounds), cell
        if "same" in cell.name:  # of equal runs
            assert 1 - cell.held["after"] < 0.09, cell


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_differences_of_clusters_are_covered(kind: str, model: str) -> None:
    rounds = 300
    for num in (3, 5, 10, 30):
        for cell in clusters_grid(kind, num, [model], rounds, methods={"after": after}):
            # One cluster in fifty differs much, all others by little: often none is drawn. Such
            # cells are covered in 0.85 to 0.92; docs/guides/compare.md tells of them.
            unseen = num == 30 and model in ("chances", "mixed") and cell.name[3:5] in HARD[:2]
            least = 0.8 if unseen else least_allowed(rounds)
            assert cell.held["after"] >= least, cell


@pytest.mark.parametrize("num", [7, 10, 15, 50])
def test_differences_of_shares_are_nearly_as_narrow_as_students(num: int) -> None:
    """Where Student's t covers; with imaginary differences of 3 / m they were up to 4 times so."""
    methods = {"t": student, "after": after}
    cells = pairs_grid(num, 200, (8, 64), methods, HARD[-2:])
    ratios = [
        cell.width["after"] / cell.width["t"] for cell in cells if 0.93 <= cell.held["t"] <= 0.97
    ]
    assert len(ratios) > 10 and np.median(ratios) <= 1.25


@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_differences_of_clusters_are_nearly_as_narrow_as_the_jackknifes(kind: str) -> None:
    methods = {"t": student, "after": after}
    cells = clusters_grid(kind, 10, ["problems"], 100, (8, 64), methods, HARD[-2:])
    ratios = [
        cell.width["after"] / cell.width["t"] for cell in cells if 0.9 <= cell.held["t"] <= 0.99
    ]
    assert len(ratios) > 10 and np.median(ratios) <= 1.25


def test_rows_are_adjusted_as_single_ones_are() -> None:
    rng = np.random.default_rng(3)
    for num in (1, 2, 3, 5, 40):
        rows = rng.integers(-3, 4, (50, num)) / 3
        rows[0], rows[1], rows[2] = 0, 1, 0.1
        centers, errors, freedom = adjusted_rows(rows)
        for row, center, error in zip(rows.tolist(), centers, errors, strict=True):
            found = adjusted_difference(row)
            assert (found.center, found.error) == pytest.approx((center, error))
            assert found.freedom == freedom


def test_rows_of_clusters_are_adjusted_as_single_ones_are() -> None:
    """So that the simulated coverage is that of `adjusted_difference`."""
    rng = np.random.default_rng(3)
    for kind, model in itertools.product(KINDS, MODELS):
        sizes = sizes_of(kind, 5, 4)
        names = np.repeat(np.arange(5), sizes).tolist()
        rows = clustered_differences(rng, 0.4, 8.0, "leap", 2, sizes, model, 20)
        rows[0] = 0
        for row, *bounds in zip(rows.tolist(), *after(rows, sizes), strict=True):
            assert difference_interval(row, names) == pytest.approx(bounds, abs=1e-9)


def test_right_and_wrong_pairs_have_the_interval_of_bonett_and_price() -> None:
    for better, worse, same in ((0, 0, 9), (4, 3, 2), (7, 0, 5), (1, 0, 30), (9, 0, 0)):
        row = [1.0] * better + [-1.0] * worse + [0.0] * same
        values = np.array([*row, 1.0, -1.0])
        found = adjusted_difference(row)
        assert found.center == pytest.approx(values.mean())
        assert found.error == pytest.approx(values.std(ddof=1) / np.sqrt(len(values)))


def test_shares_of_some_dozens_of_problems_have_no_needlessly_wide_interval() -> None:
    """Of 50 problems with 64 samples; with imaginary differences of 1 all intervals hold."""
    rng = np.random.default_rng(7)
    differences = shares_less(rng, chances_of(rng, 2, 2, "shift", (2000, 50)), 64)
    found = [difference_interval(row) for row in differences.tolist()]
    first, second = chances_of(rng, 2, 2, "shift", 1_000_000)
    assert 0.94 <= share_held(found, float((second - first).mean())) <= 0.985


@pytest.mark.parametrize("num", [5, 6, 10, 30, 100])
def test_right_and_wrong_pairs_are_told_apart_by_chance_in_one_of_twenty(num: int) -> None:
    """Computed: of runs that are equally good, all numbers of problems that differ, all rates."""
    outs = np.zeros((num + 1, num + 1))  # [better, worse]
    for better, worse in itertools.product(range(num + 1), repeat=2):
        if better + worse <= num:
            row = [1.0] * better + [-1.0] * worse + [0.0] * (num - better - worse)
            low, high = adjusted_difference(row).interval(-1, 1)
            outs[better, worse] = low > 0 or high < 0
    ups, downs = np.nonzero(outs)
    for rate in np.linspace(0.005, 1, 200):
        chance = stats.multinomial.pmf(
            np.stack([ups, downs, num - ups - downs], axis=1),
            num,
            [rate / 2, rate / 2, 1 - rate],
        )
        assert chance.sum() < 0.065, rate


def test_differences_move_the_interval_little() -> None:
    """A problem that begins to differ, and one that differs ever more."""
    for row, moved in (
        ([0.0] * 20, [0.0] * 19 + [1 / 64]),
        ([0.1] * 20, [0.1] * 19 + [0.1 + 1 / 64]),
        ([0.5] + [0.0] * 19, [0.5, 1 / 64] + [0.0] * 18),
    ):
        first, second = difference_interval(row), difference_interval(moved)
        assert first == pytest.approx(second, abs=0.004)


@pytest.mark.parametrize("model", ["all", "shares"])
def test_differences_of_clusters_of_which_one_is_large_are_covered(model: str) -> None:
    """The large one often shows no difference, where the small ones show what it could."""
    rng = np.random.default_rng(11)
    rounds = 300
    for sizes, (a, b) in itertools.product(
        ([3] * 29 + [180], [1] * 29 + [1500], [3] * 14 + [90]),
        ((0.05, 0.5), (0.1, 0.8), (0.0, 0.9)),
    ):
        names = np.repeat(np.arange(len(sizes)), sizes).tolist()
        found = []
        for _ in range(rounds):
            if model == "all":
                rights = [rng.random(len(sizes)) < each for each in (a, b)]
                one, other = (np.repeat(each, sizes).astype(np.float64) for each in rights)
            else:
                rates = [rng.beta(each + 1e-9, 1 - each, len(sizes)) for each in (a, b)]
                one, other = (rng.binomial(8, np.repeat(each, sizes)) / 8 for each in rates)
            found.append(difference_interval((other - one).tolist(), names))
        held = share_held(found, b - a)
        assert held >= least_allowed(rounds), (len(sizes), a, b, held)


# Means without bounds


def test_means_of_large_clusters_are_covered() -> None:
    """Numbers of tokens: of clusters of like sizes, and where one or two have most problems."""
    rng = np.random.default_rng(12)
    rounds = 400
    for num, kind in itertools.product((2, 3, 5, 10, 30), ("equal", "ragged", "halves", "giant")):
        sizes = sizes_of(kind, num, 10)
        names = np.repeat(np.arange(num), sizes).tolist()
        held = 0
        for _ in range(rounds):
            values = np.repeat(rng.normal(0, 30, num), sizes) + rng.normal(0, 30, sum(sizes))
            found = unbounded_error(values.tolist(), names)
            assert found is not None
            error, freedom = found
            held += abs(values.mean()) <= stats.t.ppf(0.975, freedom) * error
        assert held / rounds >= least_allowed(rounds), (num, kind, held / rounds)


def test_equal_clusters_have_the_usual_error_without_bounds() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    assert unbounded_error(values) == pytest.approx((standard_error(values), 5))
    assert unbounded_error(values, "aabbcc") == pytest.approx((standard_error(values, "aabbcc"), 2))
    assert unbounded_error(values, "aaaaaa") is None and unbounded_error([1.0]) is None


# Means of means


def check_subjects(
    kind: str, nums: list[int], betas: list[tuple[float, float]], rounds: int
) -> None:
    """Check means of subjects whose accuracies are drawn, and where one alone is ever right."""
    rng = np.random.default_rng(len(kind))
    for num, beta in itertools.product(nums, [*betas, None]):
        sizes = {
            "ragged": [1 + 7 * i % 13 for i in range(num)],
            "few": [1 + 3 * i % 4 for i in range(num)],
            "a single one": [1, *[40] * num],
        }
        sizes_of_kind = sizes.get(kind) or [int(kind)] * num
        held = 0
        for _ in range(rounds):
            rates = np.array([0.5] + [0.0] * (len(sizes_of_kind) - 1))
            if beta is not None:
                rates = rng.beta(*beta, len(sizes_of_kind))
            pairs = zip(sizes_of_kind, rates, strict=True)
            found = mean_of_means([list(map(float, rng.random(n) < rate)) for n, rate in pairs])
            held += found.low <= rates.mean() <= found.high
        assert held / rounds >= least_allowed(rounds), (num, beta, held / rounds)


@pytest.mark.parametrize("kind", ["2", "3"])
def test_means_of_subjects_with_two_or_three_questions_are_covered(kind: str) -> None:
    check_subjects(kind, [14, 57], [], 300)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["1", "2", "3", "4", "5", "40", "few", "ragged", "a single one"])
def test_means_of_subjects_are_covered(kind: str) -> None:
    betas = [(1, 1), (20, 1), (60, 1), (4, 4), (1, 9), (0.05, 0.05), (0.02, 0.98), (1, 60)]
    check_subjects(kind, [2, 3, 5, 14, 57], [(float(a), float(b)) for a, b in betas], 400)


def test_one_subject_is_a_mean_over_its_questions() -> None:
    values = [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0] * 5
    found = mean_of_means([values])
    assert found.value == pytest.approx(0.625)
    assert (found.low, found.high) == pytest.approx(mean_interval(values, 0, 1), abs=0.005)
    perfect = mean_of_means([[1.0] * 5, [1.0] * 7])
    assert perfect.low < 0.85 and (perfect.value, perfect.high, perfect.stderr) == (1.0, 1.0, 0.0)
    assert mean_of_means([[1.0], [0.0, 1.0]]).stderr is None
