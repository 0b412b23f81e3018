"""Statistics of judgements against published examples, other libraries, and slow references."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from judging_coverage import Case, coverage, draw

from treegen.errors import InputError
from treegen.evals.judging.components import (
    REST,
    design_of,
    estimate_components,
    make_cells,
)
from treegen.evals.judging.interval import FEW_LEVELS_CONFIDENCE, correct_mean, mean_of, quantile
from treegen.evals.judging.judgements import Judgement, JudgementSet, pairs_of
from treegen.evals.judging.jury import check_jury, cohens_kappa, jury_of, krippendorffs_alpha
from treegen.evals.judging.preference import bradley_terry, estimate_position_bias
from treegen.evals.judging.rubric import load_rubric
from treegen.evals.judging.sample_size import half_width_of, predict_half_width, required_numbers
from treegen.evals.judging.settings import JudgeRun, JudgeSettings
from treegen.evals.judging.summary import summarize


def test_krippendorffs_alpha_of_published_data() -> None:
    """Three observers of 15 units with gaps, as in Krippendorff's and Wikipedia's example."""
    observers = (
        "* * * * * 3 4 1 2 1 1 3 3 * 3",
        "1 * 2 1 3 3 4 3 * * * * * * *",
        "* * 2 1 3 4 4 * 2 1 1 3 3 * 4",
    )
    rows = zip(*(line.split() for line in observers), strict=True)
    units = [[int(value) for value in unit if value != "*"] for unit in rows]
    assert krippendorffs_alpha(units) == pytest.approx(0.811, abs=5e-4)
    assert krippendorffs_alpha([[1, 1], [1, 1]]) is None
    assert krippendorffs_alpha([]) is None


def test_cohens_kappa_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(50):
        num = int(rng.integers(2, 40))
        a = rng.integers(1, 5, num).tolist()
        b = [x if rng.random() < 0.6 else int(rng.integers(1, 5)) for x in a]
        if len({*a, *b}) > 1:
            # Its weights go by place among the values, unless `labels=` lists all of them.
            values = sorted({*a, *b})
            a, b = ([values.index(v) for v in each] for each in (a, b))
            found = cohens_kappa(a, b)
            assert found == pytest.approx(metrics.cohen_kappa_score(a, b, weights="quadratic"))
    assert cohens_kappa([1, 1], [1, 1]) is None
    with pytest.raises(InputError):
        cohens_kappa([1], [])


def scikit_learns_kappa(first: list[int], second: list[int], labels: list[int]) -> float:
    """`cohen_kappa_score(first, second, labels=labels, weights="quadratic")` of scikit-learn."""
    table = np.zeros((len(labels), len(labels)))
    for one, other in zip(first, second, strict=True):
        table[labels.index(one), labels.index(other)] += 1
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    place = np.arange(len(labels))
    weight = (place[:, None] - place[None, :]) ** 2
    return float(1 - (weight * table).sum() / (weight * expected).sum())


def test_quadratic_kappa_weighs_by_numbers() -> None:
    """As scikit-learn does where `labels=` lists all numbers, those that nobody gave too."""
    rng = np.random.default_rng(0)
    differs = 0
    for _ in range(50):
        a = rng.choice([1, 2, 5], 20).tolist()
        b = [x if rng.random() < 0.6 else int(rng.choice([1, 2, 5])) for x in a]
        if len({*a, *b}) < 2:
            continue
        found = cohens_kappa(a, b)
        assert found == pytest.approx(scikit_learns_kappa(a, b, [1, 2, 3, 4, 5]))
        differs += found != pytest.approx(scikit_learns_kappa(a, b, sorted({*a, *b})))
    assert differs > 20


def test_variances_of_a_balanced_design_are_those_of_the_textbook() -> None:
    """Problems x wordings, one judge, one answer: two-way analysis of variance by hand."""
    rng = np.random.default_rng(1)
    y = rng.normal(0, 0.5, (9, 1)) + rng.normal(0, 0.3, (1, 4)) + rng.normal(0, 0.2, (9, 4))
    rows = [(y[p, w], p, p, 0, w) for p in range(9) for w in range(4)]
    found = estimate_components(make_cells(rows))
    by_problem, by_wording = y.mean(axis=1), y.mean(axis=0)
    rest = y - by_problem[:, None] - by_wording[None, :] + y.mean()
    mean_rest = (rest**2).sum() / (8 * 3)
    assert found[REST] == pytest.approx(mean_rest)
    assert found["problem"] == pytest.approx(by_problem.var(ddof=1) - mean_rest / 4)
    assert found["wording"] == pytest.approx(by_wording.var(ddof=1) - mean_rest / 9)
    assert found["judge"] is None and found["answer"] is None


def test_variances_are_right_on_average_also_with_holes() -> None:
    rng = np.random.default_rng(2)
    truth = {
        "problem": 0.04,
        "answer": 0.01,
        "judge": 0.02,
        "wording": 0.005,
        "problem x judge": 0.01,
        "problem x wording": 0.004,
        REST: 0.02,
    }
    sums = dict.fromkeys(truth, 0.0)
    for _ in range(60):
        n, k, j, w = 25, 3, 6, 6
        effects = {
            "problem": rng.normal(0, 0.2, (n, 1, 1, 1)),
            "answer": rng.normal(0, 0.1, (n, k, 1, 1)),
            "judge": rng.normal(0, math.sqrt(0.02), (1, 1, j, 1)),
            "wording": rng.normal(0, math.sqrt(0.005), (1, 1, 1, w)),
            "problem x judge": rng.normal(0, 0.1, (n, 1, j, 1)),
            "problem x wording": rng.normal(0, math.sqrt(0.004), (n, 1, 1, w)),
            REST: rng.normal(0, math.sqrt(0.02), (n, k, j, w)),
        }
        y = sum(effects.values())
        rows = [
            (float(y[i]), i[0], i[:2], i[2], i[3])  # type: ignore[index]
            for i in np.ndindex(n, k, j, w)
            if rng.random() < 0.8
        ]
        for name, value in estimate_components(make_cells(rows)).items():
            assert value is not None and value >= 0
            sums[name] += value / 60
    assert sums == pytest.approx(truth, rel=0.2)


def test_a_design_of_one_cell_has_no_variances() -> None:
    assert set(estimate_components(make_cells([(0.5, "p", "a", 0, 0)])).values()) == {None}
    found = mean_of(make_cells([(0.5, "p", "a", 0, 0)]))
    assert found.value == 0.5 and found.low <= 0.5 <= found.high and found.stderr is None
    assert found.fixed_factors == ("judge", "wording")
    with pytest.raises(InputError, match="no verdict could be read"):
        make_cells([])


@pytest.mark.parametrize("case", [Case(20, 2, 3, 3), Case(30, 1, 1, 4), Case(8, 3, 1, 1)], ids=str)
def test_the_predicted_interval_is_that_of_means(case: Case) -> None:
    rng = np.random.default_rng(3)
    present, predicted = [], []
    for _ in range(60):
        found, _ = draw(case, rng)
        interval = mean_of(found)
        present.append(half_width_of(interval))
        predicted.append(
            predict_half_width(estimate_components(found), design_of(found), interval.value)
        )
    assert np.mean(predicted) == pytest.approx(np.mean(present), rel=0.05)


def test_what_is_needed_is_enough_and_no_more() -> None:
    found, _ = draw(Case(20, 2, 3, 3), np.random.default_rng(4))
    variances, design, interval = estimate_components(found), design_of(found), mean_of(found)
    scale = half_width_of(interval) / predict_half_width(variances, design, interval.value)
    for each in required_numbers(variances, design, 0.12, interval):
        if each.required is None or each.name == "repeats":
            continue
        reach = [
            scale
            * predict_half_width(variances, replace(design, **{each.name: number}), interval.value)
            for number in (each.required, max(1, each.required - 1))
        ]
        assert reach[0] <= 0.12001 and (reach[1] > 0.11999 or each.required <= 2)
    alone, _ = draw(Case(20, 2, 1, 1), np.random.default_rng(5))
    needs = required_numbers(estimate_components(alone), design_of(alone), 0.05, mean_of(alone))
    needed = {need.name: need.required for need in needs}
    assert (
        needed["judges"] is None and needed["wordings"] is None and needed["problems"] is not None
    )
    reasons = {need.name: need.reason for need in needs}
    assert reasons["judges"] == "unknown: there is only one judge"


@pytest.mark.parametrize("clustered", [False, True])
def test_as_much_as_now_is_needed_for_the_present_interval(clustered: bool) -> None:
    """Also if all values are equal, so that only the imaginary problems give the interval."""
    rng = np.random.default_rng(7)
    for values in (np.ones(20), np.full(20, 0.5), rng.random(20)):
        found = make_cells(
            [(float(y), i, (i, 0), 0, w) for i, y in enumerate(values) for w in (0, 1)]
        )
        interval = mean_of(found, {i: str(i // 4) for i in range(20)} if clustered else None)
        variances, design = estimate_components(found), design_of(found)
        width = half_width_of(interval)
        (now, *_) = required_numbers(variances, design, width * 1.0001, interval)
        assert now.required == 20
        (more, *others) = required_numbers(variances, design, width / 3, interval)
        assert more.required is not None and more.required > 30
        assert others[-1].required is None and others[-1].reason.startswith("not reachable: ")
        assert width / 3 < float(others[-1].reason.rsplit(" ", 1)[1]) < width * 1.05


@pytest.mark.parametrize(
    "case",
    [Case(5, 2, 1, 3, kind="verdicts"), Case(30, 2, 3, 3), Case(30, 1, 2, 2, kind="ties")],
    ids=str,
)
def test_intervals_cover_the_mean(case: Case) -> None:
    assert coverage(case, 150, seed=1)[0] >= 0.93


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 8])
def test_quantiles_of_few_judges_cover_uniform_effects_too(levels: int) -> None:
    """Where judges are all that varies; normal effects are covered at what the quantile says."""
    rng = np.random.default_rng(9)
    limit = quantile(0.5 + FEW_LEVELS_CONFIDENCE / 2, levels - 1)
    for effects, least in ((rng.normal, FEW_LEVELS_CONFIDENCE - 0.003), (rng.uniform, 0.933)):
        x = effects(-1, 1, (100_000, levels)) - (-1 if effects == rng.normal else 0)
        half = limit * x.std(axis=1, ddof=1) / math.sqrt(levels)
        assert (abs(x.mean(axis=1)) <= half).mean() >= least


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_intervals_cover_the_mean_over_a_grid_of_designs() -> None:
    """The table in docs/internals/intervals.md; a true 0.95 is seen above 0.93 in 1,000 runs."""
    worst = 1.0
    designs = [
        (5, 2, 1, 3),
        (5, 2, 3, 3),
        (20, 4, 1, 1),
        (20, 1, 2, 3),
        (20, 2, 3, 3),
        (100, 2, 1, 3),
        (100, 2, 2, 2),
        (100, 1, 3, 3),
        (100, 2, 5, 3),
        (100, 4, 3, 1),
        (400, 2, 2, 1),
    ]
    for kind, design, judge in itertools.product(
        ("chances", "verdicts", "ties"), designs, (0.02, 0.15)
    ):
        case = Case(*design, judge=judge, wording=judge / 2, kind=kind)
        found = coverage(case, 1000, seed=7)
        assert found[0] >= 0.93, case
        worst = min(worst, found[0])
    assert worst >= 0.93


@pytest.mark.parametrize(("labelled", "others"), [(5, 20), (12, 100), (40, 300)])
@pytest.mark.parametrize("skill", [0.95, 0.6])
def test_means_corrected_by_labels_cover_the_mean(labelled: int, others: int, skill: float) -> None:
    rng = np.random.default_rng(6)
    hits = widths = alone = 0.0
    repeats = 400
    for _ in range(repeats):
        y = (rng.random(labelled + others) < 0.7).astype(float)
        judged = np.where(rng.random(len(y)) < skill, y, 0.9)  # a judge that is too kind
        found = correct_mean(
            y[:labelled].tolist(), judged[:labelled].tolist(), judged[labelled:].tolist()
        )
        hits += found.low <= 0.7 <= found.high
        widths += found.high - found.low
        alone += found.labels_high - found.labels_low
    assert hits / repeats >= 0.93
    if labelled >= 40 and skill > 0.9:
        assert widths < 0.7 * alone


def test_corrections_are_those_of_ppi_python() -> None:
    """Its ppi_mean_pointestimate, whose numbers for these values stand here."""
    rng = np.random.default_rng(20)
    found = []
    for size in (200, 60, 15):
        p = rng.random(size)
        y = (rng.random(size) < p).astype(float)
        f = np.clip(0.1 + 0.8 * p + rng.normal(0, 0.1, size), 0, 1)
        n = size // 5 if size > 60 else 12
        corrected = correct_mean(y[:n].tolist(), f[:n].tolist(), f[n:].tolist())
        found += [corrected.weight, corrected.value]
    assert found == pytest.approx(
        [
            1.0,
            0.41262526715844317,
            0.594278806361982,
            0.40835112762202275,
            0.31922741516649644,
            0.5613581962178884,
        ],
        abs=1e-12,
    )


def test_a_correction_of_no_others_is_that_of_labels() -> None:
    found = correct_mean([1, 0, 1, 1], [1, 1, 1, 1], [])
    assert (found.weight, found.value, found.labels, found.bias) == (0, 0.75, 0.75, 0.25)
    assert (found.low, found.high) == pytest.approx((found.labels_low, found.labels_high))
    with pytest.raises(InputError, match="at least 2 problems"):
        correct_mean([1], [1], [1, 0])


def test_strengths_are_those_of_a_logistic_regression() -> None:
    """With two runs the strength is the logarithm of the odds, imaginary problems included."""
    pairs = [(str(i), 0, 1, float(i < 30)) for i in range(40)]
    first, second = bradley_terry(pairs, 2)
    odds = math.log(31 / 11)
    assert first.value - second.value == pytest.approx(odds, abs=1e-6)
    assert first.wins == 0.75 and second.wins == 0.25
    # The textbook's error of a logit, 1 / sqrt(n p q), up to the correction for few clusters.
    assert 2 * first.stderr == pytest.approx(1 / math.sqrt(42 * 31 / 42 * 11 / 42), rel=0.02)
    always = bradley_terry([(str(i), 0, 1, 1.0) for i in range(5)], 2)
    # Pairs that one run always wins do not tell how much stronger it is.
    assert always[0].low is not None and -0.3 < always[0].low < 0 and always[0].high is None
    assert always[1].high == pytest.approx(-always[0].low) and always[1].low is None
    with pytest.raises(InputError, match="do not connect all runs"):
        bradley_terry([("p", 0, 1, 1.0)], 3)


def drawn_pairs(
    rng: np.random.Generator, true: np.ndarray, problems: int, orders: int
) -> list[tuple[str, int, int, float]]:
    """Each pair of runs on each problem, judged so often."""
    return [
        (str(p), a, b, rng.binomial(orders, 1 / (1 + math.exp(true[b] - true[a]))) / orders)
        for p in range(problems)
        for a, b in itertools.combinations(range(len(true)), 2)
    ]


def strengths_held(true: np.ndarray, problems: int, orders: int, rounds: int) -> np.ndarray:
    """How often the interval of each run's strength holds it."""
    rng = np.random.default_rng(8)
    hits = np.zeros(len(true))
    for _ in range(rounds):
        found = bradley_terry(drawn_pairs(rng, true, problems, orders), len(true))
        hits += [
            (s.low is None or s.low <= t) and (s.high is None or t <= s.high)
            for s, t in zip(found, true, strict=True)
        ]
    return hits / rounds


def test_intervals_of_strengths_cover_them() -> None:
    assert (strengths_held(np.array([0.7, 0.1, -0.8]), 12, 2, 150) >= 0.93).all()


@pytest.mark.parametrize("wins", [0.95, 0.98, 0.998])
def test_strengths_of_runs_that_nearly_always_win_are_covered(wins: float) -> None:
    true = np.array([0.5, -0.5]) * math.log(wins / (1 - wins))
    assert (strengths_held(true, 20, 1, 60) >= 0.9).all()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wins", [0.6, 0.75, 0.9, 0.95, 0.98, 0.998])
@pytest.mark.parametrize(
    ("runs", "problems", "rounds"), [(2, 20, 400), (2, 80, 400), (3, 20, 200), (8, 30, 60)]
)
def test_strengths_are_covered(wins: float, runs: int, problems: int, rounds: int) -> None:
    """The best of the runs beats the worst in a share `wins` of the pairs."""
    true = np.linspace(0.5, -0.5, runs) * math.log(wins / (1 - wins))
    least = 0.93 - 3.1 * math.sqrt(0.93 * 0.07 / rounds)
    for orders in (1, 2):
        assert (strengths_held(true, problems, orders, rounds) >= least).all()


def test_position_bias_and_flips() -> None:
    always_first = estimate_position_bias({f"p{i}": [(1.0, 0.0)] * 2 for i in range(20)})
    assert always_first.first == 1 and always_first.flipped == 1 and always_first.low > 0.5
    fair = estimate_position_bias({f"p{i}": [(1.0, 1.0), (0.0, 0.0)] for i in range(20)})
    assert fair.first == 0.5 and fair.flipped == 0 and fair.low < 0.5 < fair.high
    with pytest.raises(InputError, match="both orders"):
        estimate_position_bias({"p": []})


def test_juries() -> None:
    rows = [(1.0, "p", "a", 0, 0), (0.2, "p", "a", 1, 0), (0.4, "p", "a", 2, 0)]
    assert jury_of(rows, None, "mean")[0][0] == pytest.approx(1.6 / 3)
    assert jury_of(rows, None, "majority")[0][0] == 0
    assert jury_of(rows, [3, 1, 1], "majority")[0][0] == 1
    assert jury_of(rows, [2, 1, 1], "majority")[0][0] == 0.5
    assert jury_of(rows, [2, 1, 1], "mean")[0][0] == pytest.approx(2.6 / 4)
    for weights in ([1, 1], [1, 1, 0], [1, 1, math.nan]):
        with pytest.raises(InputError, match="weights"):
            check_jury(3, weights, "mean")
    alone: list[tuple[list[float] | None, str]] = [([1.0], "mean"), (None, "majority")]
    for given, combine in alone:
        with pytest.raises(InputError, match="requires several judges"):
            check_jury(1, given, combine)


def judged_by(judge: str, verdicts: list[str | None]) -> JudgementSet:
    """The verdicts of a judge on one answer to each problem."""
    rubric = load_rubric({"choices": {"yes": 1, "no": 0}, "wordings": ["{{ answer }}"]})
    settings = JudgeSettings(rubric=rubric, verdicts="samples")
    judging = JudgeRun(judge, judge, "0", settings, ({"path": "runs/a"},), "ANSWER_1f")
    judgements = [
        Judgement(f"p{i}", ((0, 0),), 0, 0, 0, v, None if v is None else rubric.choices[v])
        for i, v in enumerate(verdicts)
    ]
    return JudgementSet(judging, tuple(judgements))


def test_the_mean_of_each_judge_counts_clusters_and_may_be_missing() -> None:
    first = judged_by("j", ["yes" if i % 4 else "no" for i in range(24)])
    groups = {f"p{i}": f"c{i // 3}" for i in range(24)}
    alone = summarize([first], groups=groups).tables[0].rows[0]
    (_, _, j, k) = summarize([first, judged_by("k", [None] * 24)], groups=groups).tables[0].rows
    assert j == alone, "the interval of one of two judges is that of this judge alone"
    assert k == ("k", *[None] * 7)


def judged_pair(
    judge: str, by_order: tuple[str, str], *, decided: bool = False, problems: int = 1
) -> JudgementSet:
    """The repeated verdicts of a judge on a pair of answers per problem, shown in both orders."""
    content = {
        "choices": {"A": 1, "B": 0},
        "wordings": ["{{ answer_a }} {{ answer_b }}"],
        "pairs": True,
    }
    rubric = load_rubric(content)
    settings = JudgeSettings(rubric=rubric, verdicts="samples", repeats=5, decided=decided)
    judging = JudgeRun(judge, judge, "0", settings, ({"path": "a"}, {"path": "b"}), "ANSWER_1f")
    orders = (((0, 0), (1, 0)), ((1, 0), (0, 0)))
    judgements = [
        Judgement(f"p{problem}", shown, 0, 0, repeat, verdict, rubric.choices[verdict])
        for problem in range(problems)
        for shown, verdicts in zip(orders, by_order, strict=True)
        for repeat, verdict in enumerate(verdicts)
    ]
    return JudgementSet(judging, tuple(judgements))


def test_pairs_count_settled_majorities_and_weights_of_judges() -> None:
    for decided, wins in ((True, 1.0), (False, (0.75 + 1) / 2)):
        strengths = pairs_of([judged_pair("j", ("AABA", "BBB"), decided=decided)]).strengths
        assert strengths[0].wins == wins, "a settled majority is a verdict, not a share of wins"
    jury = [
        judged_pair("j", ("AAA", "BBB"), decided=True),
        judged_pair("k", ("BBB", "AAA"), decided=True),
    ]
    assert pairs_of(jury).strengths[0].wins == 0.5
    assert pairs_of(jury, [3.0, 1.0]).strengths[0].wins == 0.75


def test_pairs_of_one_group_are_one_cluster() -> None:
    won, lost = judged_pair("j", ("A", "B"), problems=12), judged_pair("j", ("B", "A"), problems=24)
    later = [one for one in lost.judgements if int(one.problem_id[1:]) >= 12]
    both = [JudgementSet(won.judging, (*won.judgements, *later))]
    groups = {f"p{i}": f"g{i // 4}" for i in range(24)}
    alone, clustered = pairs_of(both), pairs_of(both, groups=groups)
    assert alone == pairs_of(both, groups={}) and clustered.runs == alone.runs
    assert clustered.strengths[0].stderr > 1.5 * alone.strengths[0].stderr
    assert alone.strengths[0].wins == alone.position.first == 0.5
    assert clustered.position.low < alone.position.low


def test_groups_do_not_change_strengths() -> None:
    pairs = [(str(i), 0, 1, float(i % 10 < 9)) for i in range(100)]
    (alone, _), (grouped, _) = (
        bradley_terry(pairs, 2, clusters)
        for clusters in (None, {str(i): i // 20 for i in range(100)})
    )
    assert grouped.value == pytest.approx(alone.value)
    # All groups agree, but five of them do not tell that the run wins more often.
    assert grouped.low is not None and grouped.low < 0
    assert alone.low is not None and 0 < alone.low < alone.value
