"""Compare two runs of the same problems, problem by problem.

Problems are the independent draws, so the test uses the differences on each problem, and pairing
removes the variation in difficulty. Interval and p-value come from one method, the adjusted t of
`treegen.evals.statistics.estimators`, so the p-value is below 0.05 exactly where the interval
excludes 0. The method adds two pseudo-observations, one problem that favours each run, as Bonett
and Price (2012) do for binary outcomes, so the interval has a width even if no problem differs.
McNemar's exact test and permutation tests would contradict such an interval near its ends. If
problems are clustered, the unit is the cluster.

Runs with early stopping are compared by the samples that are always drawn, and by their votes.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, SupportsFloat

from treegen.errors import InputError, arg, require_extra
from treegen.evals.statistics.estimators import (
    adjusted_difference,
    holm,
    pass_at_k,
    unbounded_error,
)
from treegen.evals.statistics.metrics import Clusters, clusters_of
from treegen.evals.statistics.votes import tally
from treegen.evals.verdict import MetricVerdict, Verdict
from treegen.report.changed_scores import ChangedNotice
from treegen.report.match_runs import match_runs
from treegen.report.run_settings import (
    NO_SETTING,
    KeySettings,
    describe_random_numbers,
    describe_view,
    differing_settings,
)
from treegen.report.tables import PrintableTable, headline_filters, interval, p_text
from treegen.report.view import RunView, count_equal_samples

_NO_DIFFERENCE: Final = "no difference is shown"
_COLUMNS: Final[Mapping[str, Any]] = {
    "Filter": "{0.filter}",
    "Metric": "{0.metric}",
    "A": "{0.a:.3f}",
    "B": "{0.b:.3f}",
    "B - A": "{0.value:+.3f}",
    "95% interval": lambda row: interval(row.low, row.high, signed=True),
    "p": lambda row: p_text(row.p_value),
    "p (Holm)": lambda row: p_text(row.p_holm),
    "Better": "{0.better:,}",
    "Worse": "{0.worse:,}",
}
METHOD: Final = "adjusted t interval over problems, and its p-value"
CLUSTERED: Final = "adjusted t interval over clusters of problems, and its p-value"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two runs by one metric."""

    metric: str
    """The name of the metric."""
    filter: str
    """The filter that read the answers."""
    a: float
    """The mean over problems of the first run."""
    b: float
    """The mean over problems of the second run."""
    value: float
    """B minus a."""
    low: float | None
    """The lower bound of the 95% interval of value; None for a single problem."""
    high: float | None
    """The upper bound of the 95% interval of value; None for a single problem."""
    p_value: float | None
    """Two-sided, by the interval's method; None for a single problem."""
    better: int
    """Number of problems on which b is above a."""
    worse: int
    """Number of problems on which b is below a."""
    method: str
    """How the interval and the p-value were computed."""
    by_problem: tuple[float, ...]
    """The differences, in the order of the problems."""
    p_holm: float | None = None
    """p_value adjusted for all lines of the comparison; None if only one line has a p-value."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The numbers of tokens that two runs generated for the compared problems."""

    a: int
    """The total of the first run."""
    b: int
    """The total of the second run."""
    value: float
    """The mean of b minus a over problems."""
    low: float | None
    """The lower bound of its 95% t interval over problems or clusters of problems; None if there
    is only one, or if all differences are equal."""
    high: float | None
    """The upper bound of this interval."""
    p_value: float | None
    """The p-value of Student's paired t-test; None without an interval."""

    @property
    def saved(self) -> float:
        """The share of a's tokens that b saves."""
        return 1 - self.b / self.a if self.a else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs and their differences."""

    a: str
    """The name of the first run."""
    b: str
    """The name of the second run."""
    problem_ids: tuple[str, ...]
    """The problems that were compared."""
    left_out: tuple[str, ...]
    """The problems that either run has not finished."""
    differences: tuple[Difference, ...]
    """One for each metric that both runs have, the headline first."""
    tokens: TokenDifference | None = None
    """The tokens that the runs have generated; None if one of the runs does not count them."""
    problem_indices: tuple[int, ...] = ()
    """The index of each compared problem among all problems of the runs."""
    what: tuple[str, str] = ("", "")
    """What each run is: its task, model and key settings."""
    differ_in: tuple[str, ...] = ()
    """The settings in which the runs differ, with both values, such as "temperature 0.7 / 1.0"."""
    random_numbers: str = ""
    """Whether the runs drew with the same random numbers; empty if that is not known."""
    num_equal: int = 0
    """Number of samples that have the same text in both runs, of those with the same index; 0 for
    searches by different methods."""
    num_paired: int = 0
    """Number of samples with the same index in both runs; 0 for searches by different methods."""
    hidden: tuple[str, ...] = ()
    """The filters that a short listing leaves out."""
    failed: str = ""
    """Which run's searches of the compared problems all failed, such as "all 40 searches of B
    failed"; such a run has no result to compare. Empty for all other runs."""
    notices: tuple[str, ...] = ()
    """What differs in each run from its results.json, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists. Only the headline includes its differences by problem."""
        document = asdict(self)
        for row in document["differences"][1:]:
            del row["by_problem"]
        del document["problem_indices"], document["hidden"]
        return document

    def listing(
        self, *, all_filters: bool = False, more: str = "listing(all_filters=True) has them"
    ) -> PrintableTable:
        """Return one line for each metric that both runs have, and the method of its test.

        Args:
            all_filters: Whether to show every filter, rather than the first one.
            more: How the user sees the other filters.
        """
        hidden = () if all_filters else self.hidden
        rows = [row for row in self.differences if row.filter not in hidden]
        left_out = f"; {len(self.left_out):,} unfinished ones left out" if self.left_out else ""
        several_settings = (
            f"{len(self.differ_in)} settings differ; the test cannot separate their effects"
        )
        title = "\n".join(
            (
                *(
                    f"{letter}: {name}{f', {what}' if what else ''}"
                    for letter, name, what in zip("AB", (self.a, self.b), self.what, strict=True)
                ),
                f"differ in: {', '.join(self.differ_in) or NO_SETTING}",
                *([several_settings] if len(self.differ_in) > 1 else []),
                *self.notices,
                f"{len(self.problem_ids):,} problems, paired{left_out}",
                f"conclusion: none, because {self.failed}" if self.failed else _summarize(rows),
            )
        )
        lines = []
        for method in dict.fromkeys(row.method for row in rows):
            names = dict.fromkeys(row.metric for row in rows if row.method == method)
            lines.append(f"{', '.join(names)}: {method}")
        columns = dict(_COLUMNS)
        if any(row.p_holm is not None for row in self.differences):
            where = "all filters" if hidden else "the table"
            lines.append(f"p (Holm): adjusted for the {len(self.differences):,} lines of {where}")
        else:
            del columns["p (Holm)"]
        if self.random_numbers:
            lines.append(f"random numbers: {self.random_numbers}")
        if self.tokens is not None:
            lines.append(_describe_tokens(self.tokens))
        if self.num_paired:
            some = f"{self.num_equal:,} of" if self.num_equal < self.num_paired else "all"
            lines.append(f"samples: {some} {self.num_paired:,} have the same text in both runs")
        if hidden:
            lines.append(f"other filters: {', '.join(hidden)}; {more}")
        listing = PrintableTable.of(rows, columns, words=("Filter", "Metric"), lines=lines)
        return replace(listing, title=title)

    def __str__(self) -> str:
        return str(self.listing())

    def _repr_html_(self) -> str:
        return self.listing()._repr_html_()


def _summarize(rows: Sequence[Difference]) -> str:
    """Return one line that says which run is better in which metrics, by the adjusted p-values.

    It names the metrics whose p-value is too high only because of the adjustment.
    """
    several = len({row.filter for row in rows}) > 1
    metrics: dict[str, list[str]] = {}
    only_before: list[str] = []
    for row in rows:
        p = row.p_value if row.p_holm is None else row.p_holm
        result = _NO_DIFFERENCE
        if p is not None and p < 0.05:
            result = f"{'B' if row.value > 0 else 'A'} is better"
        name = f"{row.metric} ({row.filter})" if several else row.metric
        metrics.setdefault(result, []).append(name)
        if result == _NO_DIFFERENCE and row.p_value is not None and row.p_value < 0.05:
            only_before.append(f"{name} has p {p_text(row.p_value)}")
    if list(metrics) == [_NO_DIFFERENCE] and len(rows) > 1:
        parts = [f"{_NO_DIFFERENCE} in any metric"]
    else:
        parts = [f"{result} in {', '.join(names)}" for result, names in metrics.items()]
    if only_before:
        parts.append(f"before adjustment, {', '.join(only_before)}")
    rule = "p" if all(row.p_holm is None for row in rows) else "p (Holm)"
    return f"conclusion ({rule} < 0.05): {'; '.join(parts)}"


def compare_runs(a: RunView, b: RunView, *, partial: bool = False) -> Comparison:
    """Return the differences of two runs on the problems that both have finished.

    Args:
        a: The first run.
        b: The second run.
        partial: Leave out problems that either run has not finished, instead of raising an error.

    Raises:
        InputError: the runs cannot be compared: they have other problems, another task or version
            of it, no common filter, or unfinished problems. Or scipy is not installed.
    """
    a, b = match_runs(a, b)
    unfinished = _find_unfinished(a, b, partial=partial)
    left_out = set(unfinished)
    ids = [p.id for p in a.problems if p.id not in left_out]
    if not ids:
        raise InputError(
            f"no problem is finished in both runs; finish the runs with {arg('resume=')}"
        )
    shared = _find_shared_filters(a, b)
    # A log of another tool may have no groups.
    clusters = clusters_of(a.problems, ids) or clusters_of(b.problems, ids)
    differences = _compare_verdicts(a, b, ids, shared, clusters)
    differences += _compare_judgements(a, b, ids, clusters)
    if not differences:
        raise InputError(
            f"no metric of the task {a.task} has a value from 0 to 1 for each problem; compare "
            "the metrics that `treegen score` prints"
        )
    shared_problems = [[p for p in view.problems if p.id not in left_out] for view in (a, b)]
    token_counts = [
        [sum(s.num_tokens for s in p.samples) for p in problems] for problems in shared_problems
    ]
    tokens = None  # a log of another tool may have no numbers of tokens
    if all(map(sum, token_counts)):
        tokens = _compare_tokens(token_counts[0], token_counts[1], clusters)
    problem_indices = tuple(i for i, problem in enumerate(a.problems) if problem.id not in left_out)
    p_values = [row.p_value for row in differences]
    # A single p-value needs no adjustment.
    several = sum(p is not None for p in p_values) > 1
    adjusted = holm(p_values) if several else [None] * len(p_values)
    rows = tuple(replace(row, p_holm=p) for row, p in zip(differences, adjusted, strict=True))
    settings = KeySettings.of(a), KeySettings.of(b)
    is_same_method = not settings[0].searches_unlike(settings[1])
    num_equal, num_paired = count_equal_samples(a, b, left_out) if is_same_method else (0, 0)
    # The tasks of a group may have different headline filters.
    is_one_task = len(headline_filters(a.report)) == 1
    return Comparison(
        a.name,
        b.name,
        tuple(ids),
        unfinished,
        rows,
        tokens,
        problem_indices,
        (describe_view(a), describe_view(b)),
        differing_settings(*settings),
        describe_random_numbers(a, b, is_similar=num_equal > 0),
        num_equal,
        num_paired,
        tuple(shared[1:]) if is_one_task else (),
        _describe_failed(a, b, left_out),
        tuple(
            f"{letter}: {line}"
            for letter, view in zip("AB", (a, b), strict=True)
            for line in view.notices
            if isinstance(line, ChangedNotice)
        ),
    )


def _describe_failed(a: RunView, b: RunView, left_out: Container[str]) -> str:
    """Return which run's searches all failed, or "" if each run has a search that did not fail.

    Args:
        a: The first run.
        b: The second run, of the same problems.
        left_out: The ids of the problems that are not compared.
    """
    descriptions = []
    for letter, view in zip("AB", (a, b), strict=True):
        trees = [tree for tree in view.trees if tree.problem_id not in left_out]
        if trees and all(tree.error for tree in trees):
            searches = "the only search" if len(trees) == 1 else f"all {len(trees):,} searches"
            descriptions.append(f"{searches} of {letter} failed")
    return " and ".join(descriptions)


def _find_unfinished(a: RunView, b: RunView, *, partial: bool) -> tuple[str, ...]:
    """Return the ids of the problems that either run has not finished.

    Args:
        a: The first run.
        b: The second run, of the same problems.
        partial: Whether unfinished problems are allowed.

    Raises:
        InputError: there are unfinished problems, and `partial` is False.
    """
    unfinished = tuple(
        p.id
        for p, q in zip(a.problems, b.problems, strict=True)
        if not (a.is_whole(p) and b.is_whole(q))
    )
    if unfinished and not partial:
        raise InputError(
            f"{len(unfinished):,} of {len(a.problems):,} problems are unfinished in one or both "
            f"of the runs, such as {unfinished[0]!r}; finish the runs with {arg('resume=')}, or "
            f"compare only the finished problems with {arg('partial', True)}"
        )
    return unfinished


def _find_shared_filters(a: RunView, b: RunView) -> list[str]:
    """Return the filters of both runs, or raise InputError if there are none."""
    shared = [filter for filter in a.filters if filter in b.filters]
    if not shared:
        for view in (a, b):
            if view.unread:
                raise InputError(f"{view.path} cannot be compared: {view.unread.marked}")
        filters = [f"{view.path} has {', '.join(view.filters) or 'none'}" for view in (a, b)]
        remedy = "score both runs with the same filter"
        if any(view.job is None and not view.filters for view in (a, b)):
            remedy = (
                "if the task is in a file of your own that you trust, pass "
                f"{arg('allow_task_code', True)}"
            )
        raise InputError(f"the runs have no filter in common: {'; '.join(filters)}; {remedy}")
    return shared


def _compare_verdicts(
    a: RunView, b: RunView, ids: Sequence[str], filters: Sequence[str], clusters: Clusters
) -> list[Difference]:
    """Return the differences of accuracies, votes and pass@k by each filter.

    Raises:
        InputError: some problems have no verdicts.
    """
    max_k = min(a.fixed or a.num_samples, b.fixed or b.num_samples)
    stopped_early = a.voters is not None or b.voters is not None
    votes = all(view.report is not None and view.report.majority for view in (a, b))
    # As `treegen show` names the metric.
    correctness = "solved" if a.searched or b.searched else "accuracy"
    differences: list[Difference] = []
    for filter in filters:
        first, second = (view.verdicts(filter, fixed=True) for view in (a, b))
        if missing := [p for p in ids if p not in first or p not in second]:
            raise InputError(
                f"{len(missing):,} problems have no verdicts in one or both of the runs, such "
                f"as {missing[0]!r}; score the runs first"
            )
        verdicts = [verdict for run in (first, second) for p in ids for verdict in run[p]]
        names = _task_metrics(verdicts)
        if names is None:
            names = [correctness]
        metrics: list[tuple[str, Callable[[Sequence[Verdict]], float]]] = [
            (name, partial(_mean_metric, name)) for name in names
        ]
        if min(len(run[p]) for run in (first, second) for p in ids) >= max_k > 1:
            if votes:
                metrics.append((f"maj@{max_k}", partial(_maj_at_k, max_k)))
            metrics.append((f"pass@{max_k}", partial(_pass_at_k, max_k)))
        for metric, measure in metrics:
            values = [[measure(run[p]) for p in ids] for run in (first, second)]
            differences.append(_compute_difference(metric, filter, values[0], values[1], clusters))
        if stopped_early and votes:
            values = [_final_votes(view, filter, ids) for view in (a, b)]
            index = sum(row.filter != filter for row in differences) + 1
            row = _compute_difference("vote", filter, values[0], values[1], clusters)
            differences.insert(index, row)
    return differences


def _compare_judgements(
    a: RunView, b: RunView, ids: Sequence[str], clusters: Clusters
) -> list[Difference]:
    """Return the differences of the values that the same judges give by the same rubric."""
    summaries_of_b = {summary.key: summary for summary in b.summaries}
    differences = []
    for first in a.summaries:
        second = summaries_of_b.get(first.key)
        if second is None or any(
            i not in first.by_problem or i not in second.by_problem for i in ids
        ):
            continue
        values = [[summary.by_problem[i] for i in ids] for summary in (first, second)]
        differences.append(
            _compute_difference("judged", first.title, values[0], values[1], clusters)
        )
    return differences


def _final_votes(view: RunView, filter: str, ids: Sequence[str]) -> list[float]:
    """Return how correct the final vote of each problem is, from all samples that vote."""
    votes = []
    verdicts = view.verdicts(filter)
    for problem_id in ids:
        voters = verdicts[problem_id]
        if view.voters is not None:
            voters = voters[: view.voters[problem_id]]
        votes.append(tally(voters).maj_at_k(len(voters)))
    return votes


def _compare_tokens(a: Sequence[int], b: Sequence[int], clusters: Clusters) -> TokenDifference:
    differences = [y - x for x, y in zip(a, b, strict=True)]
    value = fmean(differences)
    error, freedom = unbounded_error(differences, clusters) or (0.0, 0.0)
    if not error:  # without a spread there is no test
        return TokenDifference(sum(a), sum(b), value, None, None, None)
    student = _student_t()
    half = float(student.ppf(0.975, freedom)) * error
    p_value = 2 * float(student.sf(abs(value) / error, freedom))
    return TokenDifference(sum(a), sum(b), value, value - half, value + half, p_value)


def _task_metrics(verdicts: Sequence[Verdict]) -> list[str] | None:
    """Return the task's own metrics that are from 0 to 1 for every sample; None if it has none."""
    measures = [verdict.measures for verdict in verdicts if isinstance(verdict, MetricVerdict)]
    if not measures or len(measures) < len(verdicts):
        return None
    return [name for name in measures[0] if all(_is_share(values.get(name)) for values in measures)]


def _is_share(value: object) -> bool:
    return isinstance(value, SupportsFloat) and 0 <= float(value) <= 1


def _mean_metric(metric: str, verdicts: Sequence[Verdict]) -> float:
    """Return the mean of a metric over the samples of a problem.

    Args:
        metric: The name of a metric of the task. Any other name selects correctness.
        verdicts: The verdicts on the samples.
    """
    return fmean(
        float(verdict.measures[metric])
        if isinstance(verdict, MetricVerdict) and metric in verdict.measures
        else float(verdict.correct)
        for verdict in verdicts
    )


def _maj_at_k(k: int, verdicts: Sequence[Verdict]) -> float:
    return tally(verdicts).maj_at_k(k)


def _pass_at_k(k: int, verdicts: Sequence[Verdict]) -> float:
    return pass_at_k(len(verdicts), sum(verdict.correct for verdict in verdicts), k)


def _compute_difference(
    metric: str, filter: str, a: Sequence[float], b: Sequence[float], clusters: Clusters = None
) -> Difference:
    """Return the difference of two runs, with its interval and p-value.

    Args:
        metric: The name of the metric.
        filter: The filter that read the answers.
        a: The value of the first run for each problem.
        b: The value of the second run for each problem, in the same order.
        clusters: The cluster of each problem; None if all problems are independent.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    if len(differences) > 1:
        adjusted = adjusted_difference(differences, clusters)
        low, high = adjusted.interval(-1.0, 1.0)
        p_value = 2 * float(_student_t().sf(abs(adjusted.statistic), adjusted.freedom))
    return Difference(
        metric=metric,
        filter=filter,
        a=fmean(a),
        b=fmean(b),
        value=fmean(differences),
        low=low,
        high=high,
        p_value=p_value,
        better=better,
        worse=worse,
        method=METHOD if clusters is None else CLUSTERED,
        by_problem=tuple(differences),
    )


def _student_t() -> Any:
    with require_extra("comparing runs needs scipy", "report"):
        from scipy.stats import t
    return t


def _describe_tokens(tokens: TokenDifference) -> str:
    line = f"tokens: A {tokens.a:,}, B {tokens.b:,}"
    if tokens.a != tokens.b:
        line += f" ({abs(tokens.saved):.1%} {'fewer' if tokens.saved > 0 else 'more'})"
    if tokens.low is None or tokens.high is None:
        return line
    line += f"; B - A {tokens.value:+,.0f} per problem ({tokens.low:+,.0f} to {tokens.high:+,.0f})"
    return f"{line}, p {p_text(tokens.p_value)} (not part of the conclusion)"
