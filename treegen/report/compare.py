"""Two runs of the same problems, problem by problem.

Problems are the independent draws. So the differences on each problem are tested, never the two
sets of samples as if they had nothing in common. Pairing takes out how hard the problems are.

The interval is the adjusted t interval of `evals.stats`. It adds one imaginary problem on which the
second run is right and the first wrong, and one the other way round, as Bonett and Price (2012) do
for right and wrong. So it has a width even where no problem differs.

The test depends on the metric:

- Where every problem is right or wrong (one sample, pass@n, a vote without ties), only the problems
  on which the runs disagree tell anything. That is McNemar's exact test.
- Where a problem has a share between 0 and 1, McNemar's test does not apply. A sign-flip
  permutation test is used, which assumes no distribution. Where both tests apply they agree.

Student's paired t-test stands beside both. Where problems are clustered, the interval is that of
the clusters, and the signs of whole clusters are flipped.

A run that stops problems whose vote is decided is compared by the samples that were drawn whatever
came, and by the votes that its problems stopped with.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from treegen.errors import InputError, install
from treegen.evals.statistics.estimators import mean_interval, pass_at_k
from treegen.evals.statistics.metrics import Clusters
from treegen.evals.statistics.votes import tally
from treegen.evals.verdict import Verdict
from treegen.report.tables import Listing, interval
from treegen.report.view import ProblemView, RunView

_RESAMPLES: Final = 9999
_HEAD: Final = [
    "Filter",
    "Metric",
    "A",
    "B",
    "B - A",
    "95% interval",
    "p",
    "t-test",
    "Better",
    "Worse",
]
INTERVAL: Final = "adjusted t interval over problems"
MCNEMAR: Final = f"{INTERVAL} and McNemar's exact test, since each problem is right or wrong"
SIGN_FLIP: Final = (
    f"{INTERVAL} and sign-flip permutation test, since problems have shares between 0 and 1"
)
CLUSTERED: Final = (
    "adjusted t interval over clusters and sign-flip permutation test of whole clusters"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """How much better the second run is than the first by one metric.

    metric: the name of the metric.
    filter: the way in which answers were read.
    a, b: the means over problems of the first and the second run.
    value: b minus a.
    low, high: the 95% interval of value; None for a single problem.
    p_value: two-sided; None for a single problem.
    better, worse: on how many problems b is above or below a.
    method: how the interval and the p-value were computed.
    by_problem: the differences, in the order of the problems.
    t_test: the p-value of Student's paired t-test; None if it has none, as with clusters.
    """

    metric: str
    filter: str
    a: float
    b: float
    value: float
    low: float | None
    high: float | None
    p_value: float | None
    better: int
    worse: int
    method: str
    by_problem: tuple[float, ...]
    t_test: float | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many tokens two runs have generated for the problems that are compared.

    a, b: in all. value: b minus a, for a problem in the mean; low, high: its 95% t interval over
    problems, None for a single one. p_value: of Student's paired t-test.
    """

    a: int
    b: int
    value: float
    low: float | None
    high: float | None
    p_value: float | None

    @property
    def saved(self) -> float:
        """The share of a's tokens that b does without."""
        return 1 - self.b / self.a if self.a else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, and how they differ.

    a, b: the names of the runs.
    problem_ids: the problems that were compared.
    left_out: the problems that either run has not finished.
    differences: one for each metric that both runs have, the headline first.
    tokens: what the runs have generated.
    places: where each problem stands among all problems of the runs.
    """

    a: str
    b: str
    problem_ids: tuple[str, ...]
    left_out: tuple[str, ...]
    differences: tuple[Difference, ...]
    tokens: Tokens | None = None
    places: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists. Only the headline has its differences by problem."""
        document = asdict(self)
        for row in document["differences"][1:]:
            del row["by_problem"]
        del document["places"]
        return document

    def listing(self) -> Listing:
        """Return one line for each metric that both runs have, and how it was tested."""
        return _listing(self)

    def __str__(self) -> str:
        return str(self.listing())

    def _repr_html_(self) -> str:
        return self.listing()._repr_html_()


def compare_runs(a: RunView, b: RunView, *, partial: bool = False, seed: int = 0) -> Comparison:
    """Return how two runs differ on the problems that both have finished.

    partial: leave out problems that either run has not finished, instead of refusing.
    seed: the seed of resampling, so that the same runs give the same numbers.

    Raises:
        InputError: the runs cannot be compared: they have other problems, another task or version
            of it, no common filter, or unfinished problems. Or scipy is not installed.
    """
    _check_same_problems(a, b)
    unfinished = tuple(
        p.id
        for p, q in zip(a.problems, b.problems, strict=True)
        if not (_is_whole(a, p) and _is_whole(b, q))
    )
    if unfinished and not partial:
        raise InputError(
            f"{len(unfinished):,} of {len(a.problems):,} problems are not finished in both runs, "
            f"such as {unfinished[0]!r}; finish them with resume=, or compare the others with "
            "partial=True"
        )
    ids = [p.id for p in a.problems if p.id not in set(unfinished)]
    if not ids:
        raise InputError("there is no problem that both runs have finished")
    shared = [filter for filter in a.filters if filter in b.filters]
    if not shared:
        raise InputError(f"the runs have no verdicts by a common filter: {_lacks(a)}; {_lacks(b)}")
    generator = np.random.default_rng(seed)
    most = min(a.fixed or a.num_samples, b.fixed or b.num_samples)
    stops = a.voters is not None or b.voters is not None
    group_of = {p.id: p.group for p in a.problems if p.group}
    clusters = [(group_of[i],) if i in group_of else ("", i) for i in ids] if group_of else None
    votes = all(view.report is not None and view.report.majority for view in (a, b))
    found = []
    for filter in shared:
        first, second = (view.verdicts(filter, fixed=True) for view in (a, b))
        if missing := [p for p in ids if p not in first or p not in second]:
            raise InputError(
                f"{len(missing):,} problems have no verdicts in both runs, such as {missing[0]!r}; "
                "score the runs first"
            )
        for metric in _metrics(most, votes=votes):
            values = [[_value(metric, most, run[p]) for p in ids] for run in (first, second)]
            found.append(_difference(metric, filter, values[0], values[1], generator, clusters))
        if stops and votes:
            values = [_final_votes(view, filter, ids) for view in (a, b)]
            place = sum(row.filter != filter for row in found) + 1
            row = _difference("vote", filter, values[0], values[1], generator, clusters)
            found.insert(place, row)
    tokens = _tokens(*([_num_tokens(view)[i] for i in ids] for view in (a, b)))
    number = {problem.id: number for number, problem in enumerate(a.problems)}
    places = tuple(number[i] for i in ids)
    return Comparison(a.name, b.name, tuple(ids), unfinished, tuple(found), tokens, places)


def _is_whole(view: RunView, problem: ProblemView) -> bool:
    """Whether nothing more is to be drawn of a problem."""
    if view.voters is not None:
        return problem.id in view.voters
    return len(problem.samples) >= view.num_samples


def _final_votes(view: RunView, filter: str, ids: Sequence[str]) -> list[float]:
    """Return what the vote of each problem came to, with all samples that vote."""
    found = []
    verdicts = view.verdicts(filter)
    for problem_id in ids:
        mine = verdicts[problem_id]
        if view.voters is not None:
            mine = mine[: view.voters[problem_id]]
        found.append(tally(mine).maj_at_k(len(mine)))
    return found


def _num_tokens(view: RunView) -> dict[str, int]:
    return {p.id: sum(sample.num_tokens for sample in p.samples) for p in view.problems}


def _tokens(a: Sequence[int], b: Sequence[int]) -> Tokens:
    differences = [y - x for x, y in zip(a, b, strict=True)]
    value = math.fsum(differences) / len(differences)
    if len(set(differences)) < 2:  # there is no spread to test by
        return Tokens(sum(a), sum(b), value, None, None, None)
    test = _scipy().ttest_rel(b, a)
    interval = test.confidence_interval()
    low, high = float(interval.low), float(interval.high)
    return Tokens(sum(a), sum(b), value, low, high, float(test.pvalue))


def _task(task: Any) -> str:
    return f"{task['name']} version {task['version']}" if isinstance(task, dict) else "no task"


def _check_same_problems(a: RunView, b: RunView) -> None:
    tasks = [view.info.identity.get("task") for view in (a, b)]
    if tasks[0] != tasks[1]:
        raise InputError(
            f"{a.path} is of {_task(tasks[0])} and {b.path} of {_task(tasks[1])}; only runs of one "
            "version of one task can be compared"
        )
    first, second = set(a.info.problem_ids), set(b.info.problem_ids)
    if first != second:
        only = [f"{len(x - y):,} only in {view.path}" for x, y, view in
                ((first, second, a), (second, first, b)) if x - y]  # fmt: skip
        raise InputError(
            f"the runs are of different problems: {len(first & second):,} in common, "
            f"{' and '.join(only)}; run both with the same data= and limit="
        )
    data = [view.info.identity.get("data", {}).get("problems") for view in (a, b)]
    if data[0] != data[1] or a.info.problem_ids != b.info.problem_ids:
        raise InputError(
            f"the problems of {a.path} and {b.path} have the same ids but not the same content; "
            "run both with the same data="
        )


def _lacks(view: RunView) -> str:
    return f"{view.path} has {', '.join(view.filters) or 'none'}"


def _metrics(most: int, *, votes: bool) -> list[str]:
    if most == 1:
        return ["accuracy"]
    return ["accuracy", *([f"maj@{most}"] if votes else []), f"pass@{most}"]


def _value(metric: str, k: int, verdicts: Sequence[Verdict]) -> float:
    right = sum(verdict.correct for verdict in verdicts)
    if metric.startswith("pass@"):
        return pass_at_k(len(verdicts), right, k)
    return tally(verdicts).maj_at_k(k) if metric.startswith("maj@") else right / len(verdicts)


def _difference(
    metric: str,
    filter: str,
    a: Sequence[float],
    b: Sequence[float],
    generator: np.random.Generator,
    clusters: Clusters = None,
) -> Difference:
    differences = [y - x for x, y in zip(a, b, strict=True)]
    num = len(differences)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    binary = all(value in (0.0, 1.0) for value in (*a, *b))
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    t_test: float | None = None
    if num > 1:
        low, high = mean_interval(differences, -1.0, 1.0, clusters)
        if clusters is not None:
            sums: dict[Hashable, list[float]] = {}
            for cluster, each in zip(clusters, differences, strict=True):
                sums.setdefault(cluster, []).append(each)
            if len(sums) > 1:
                p_value = _sign_flip([math.fsum(mine) for mine in sums.values()], generator)
        else:
            p_value = _mcnemar(better, worse) if binary else _sign_flip(differences, generator)
            t_test = _t_test(differences)
    return Difference(
        metric=metric,
        filter=filter,
        a=math.fsum(a) / num,
        b=math.fsum(b) / num,
        value=math.fsum(differences) / num,
        low=low,
        high=high,
        p_value=p_value,
        better=better,
        worse=worse,
        method=CLUSTERED if clusters is not None else MCNEMAR if binary else SIGN_FLIP,
        by_problem=tuple(differences),
        t_test=t_test,
    )


def _t_test(differences: Sequence[float]) -> float | None:
    """Return the p-value of Student's paired t-test; None where all differences are equal."""
    if len(set(differences)) < 2:
        return None
    return float(_scipy().ttest_1samp(differences, 0.0).pvalue)


def _mcnemar(better: int, worse: int) -> float:
    """Return McNemar's p-value of a difference between paired right and wrong answers."""
    stats = _scipy()
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _sign_flip(differences: Sequence[float], generator: np.random.Generator) -> float:
    """Return the p-value of a mean of paired differences, by random sign flips."""
    stats = _scipy()
    array = np.asarray(differences)
    if not array.any():
        return 1.0
    # A batch of flips holds about this many numbers.
    batch = max(1, 2**22 // len(array))
    flipped = stats.permutation_test(
        (array,), np.mean, permutation_type="samples", n_resamples=_RESAMPLES, rng=generator,
        vectorized=True, batch=batch,
    )  # fmt: skip
    return float(flipped.pvalue)


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise InputError(
            f"comparing runs needs scipy; install it with: {install('report')}"
        ) from None
    return stats


def _listing(found: Comparison) -> Listing:
    rows = [
        [
            row.filter,
            row.metric,
            f"{row.a:.3f}",
            f"{row.b:.3f}",
            f"{row.value:+.3f}",
            interval(row.low, row.high, signed=True),
            _p_value(row.p_value),
            _p_value(row.t_test),
            f"{row.better:,}",
            f"{row.worse:,}",
        ]
        for row in found.differences
    ]
    left_out = f"; {len(found.left_out):,} unfinished ones left out" if found.left_out else ""
    title = f"A: {found.a}\nB: {found.b}\n{len(found.problem_ids):,} problems, paired{left_out}"
    lines = []
    for method in dict.fromkeys(row.method for row in found.differences):
        names = dict.fromkeys(row.metric for row in found.differences if row.method == method)
        lines.append(f"{', '.join(names)}: {method}")
    if found.tokens is not None:
        lines.append(_tokens_told(found.tokens))
    return Listing(_HEAD, rows, range(2, len(_HEAD)), title, lines)


def _tokens_told(found: Tokens) -> str:
    told = f"tokens: A {found.a:,}, B {found.b:,}"
    if found.a != found.b:
        told += f" ({abs(found.saved):.1%} {'fewer' if found.saved > 0 else 'more'})"
    if found.low is None or found.high is None:
        return told
    bounds = f"{found.low:+,.0f} to {found.high:+,.0f}"
    p_value = _p_value(found.p_value)
    return f"{told}; B - A {found.value:+,.0f} for a problem ({bounds}), t-test p {p_value}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4f}" if value >= 0.00005 else "<0.0001"
