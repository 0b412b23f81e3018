"""Computation of metrics from scored samples, as a pure function that prints nothing."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from treegen.common.checks import check_argument_types, checked_class
from treegen.errors import InputError, arg
from treegen.evals.statistics.estimators import estimate, find_clusters, pass_at_k
from treegen.evals.statistics.reliability import reliability_values
from treegen.evals.statistics.tables import Grid, Table
from treegen.evals.statistics.votes import Tally, count_distinct, tally_of
from treegen.evals.verdict import SampleScore

if TYPE_CHECKING:
    from treegen.evals.problem import Problem


Clusters = Sequence[Hashable] | None


class HasGroup(Protocol):
    """A problem, or a view of a problem, with an id and a group."""

    @property
    def id(self) -> str:
        """The id of the problem."""

    @property
    def group(self) -> str:
        """The group of the problem; empty if it has none."""


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Settings of a report: the planned problems and samples, and the k of metrics."""

    problem_ids: Sequence[str]
    """Ids of all planned problems, so that the report can list missing samples."""
    num_samples: int
    """Samples planned for each problem."""
    num_fewshot: int = 0
    """Few-shot examples before each problem."""
    pass_ks: Sequence[int] | None = None
    """The k of pass@k; None picks them from num_samples."""
    maj_ks: Sequence[int] | None = None
    """The k of maj@k; None picks them from num_samples."""
    pass_hat_ks: Sequence[int] = ()
    """The k of pass^k and G-Pass@k."""
    problems: Sequence["Problem"] = ()
    """The planned problems themselves, for tasks that report by their metadata. If empty, such
    tables are left out."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"{arg('num_samples')} must be at least 1, got {self.num_samples}")
        for k in (*(self.pass_ks or ()), *(self.maj_ks or ()), *self.pass_hat_ks):
            if k < 1:
                raise InputError(f"k must be at least 1, got {k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One line of the result table."""

    task: str
    """The name of the task."""
    version: str
    """The version of the task."""
    filter: str
    """The name of the rule that extracted the answers from the texts."""
    num_fewshot: int | None
    """Few-shot examples before each problem; None if unknown."""
    metric: str
    """The name of the metric."""
    value: float | None
    """None if the metric is undefined; `reason` then says why."""
    stderr: float | None = None
    """The standard error over problems; None for a single problem."""
    low: float | None = None
    """The lower bound of a 95% interval over problems."""
    high: float | None = None
    """The upper bound of a 95% interval over problems."""
    higher_is_better: bool = True
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityRow:
    """maj@k of one filter; the fields are as in `MetricRow`."""

    filter: str
    k: int
    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    tie_rate: float | None = None
    """The share of votes without a single winner."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A problem that has fewer samples than planned."""

    problem_id: str
    num_samples: int
    planned: int


@dataclass(frozen=True, slots=True)
class Report:
    """All metrics of a run. No value is NaN."""

    metrics: tuple[MetricRow, ...]
    """The lines of the result table."""
    majority: tuple[MajorityRow, ...]
    """Maj@k by filter and k."""
    num_problems: int
    """Problems with at least one scored sample."""
    num_samples: int
    """Scored samples."""
    incomplete: tuple[Incomplete, ...]
    """Problems with fewer samples than planned."""
    tables: tuple[Table, ...] = ()
    """Tables that only this task has, such as accuracy by subject."""
    grids: tuple[Grid, ...] = ()
    """Grids that only this task has, such as accuracy by depth and length."""
    label: str = ""
    """Distinguishes the problems or prompts from other runs of the same task; may be empty."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain dicts and lists, without the label if it is empty."""
        fields = asdict(self)
        return fields if self.label else {name: fields[name] for name in fields if name != "label"}

    def value(self, metric: str, filter: str) -> float | None:
        """Return the value of one metric of the table; None if the metric is undefined.

        Raises:
            InputError: the table has no such metric for this filter.
        """
        for row in self.metrics:
            if (row.metric, row.filter) == (metric, filter):
                return row.value
        available = ", ".join(sorted({f"{row.metric} ({row.filter})" for row in self.metrics}))
        raise InputError(
            f"the report has no metric {metric!r} for filter {filter!r}; it has the metrics "
            f"{available}"
        )


def default_maj_ks(num_samples: int) -> tuple[int, ...]:
    """Return 1, the fifths of num_samples, and num_samples."""
    return tuple(sorted({1, *(max(1, round(num_samples * i / 5)) for i in range(1, 6))}))


def default_pass_ks(num_samples: int) -> tuple[int, ...]:
    """Return those of 10, 100, 1000 that are below num_samples, and num_samples if above 1.

    pass@1 is left out, because it equals exact_match.
    """
    return tuple(k for k in (10, 100, 1000) if k < num_samples) + (
        (num_samples,) if num_samples > 1 else ()
    )


@check_argument_types
def summarize(
    scores: Sequence[SampleScore],
    options: ReportOptions,
    *,
    task: str,
    version: str,
    filters: Sequence[str],
) -> Report:
    """Aggregate scored samples; the same scores in any order give the same report.

    Every metric is a mean over problems of a per-problem estimate. A metric that is undefined for
    any problem is reported as undefined, never as the mean of the rest.

    If problems have choices, the metrics are `acc`, the accuracy of the most likely choice, and
    `acc_norm`, the accuracy of the choice that is most likely for its length. The report then has
    no votes, and no metrics of unreadable or truncated samples.

    Args:
        scores: The scored samples of all problems.
        options: The planned problems and samples, and the k of the metrics.
        task: Name of the task.
        version: Version of the task.
        filters: Names of the filters to report, in order.

    Raises:
        InputError: a sample occurs twice, or its problem was not planned.
    """
    samples_of = _group(scores, options.problem_ids)
    incomplete = tuple(
        Incomplete(problem_id, len(samples_of[problem_id]), options.num_samples)
        for problem_id in options.problem_ids
        if len(samples_of[problem_id]) < options.num_samples
    )
    groups = [group for group in samples_of.values() if group]
    clusters = clusters_of(options.problems, [p for p in samples_of if samples_of[p]])
    chosen = any(problem.choices for problem in options.problems)
    # Samples with equal verdicts share one mapping of verdicts by filter, so few are distinct.
    counts = [count_distinct([sample.verdicts for sample in group]) for group in groups]
    metrics: list[MetricRow] = []
    majority: list[MajorityRow] = []
    for name in filters:
        head: dict[str, Any] = {"task": task, "version": version, "filter": name}
        if chosen:
            rows = _choice_rows(groups, name, clusters)
        else:
            # In a log of another tool, a filter may not have scored every sample.
            judged = [[(v[name], times) for v, times in counted if name in v] for counted in counts]
            tallies = [tally_of(counted) for counted in judged if counted]
            judged_clusters = clusters and [
                c for c, counted in zip(clusters, judged, strict=True) if counted
            ]
            rows = _filter_rows(tallies, options, judged_clusters)
            votes = _majority(tallies, options, judged_clusters)
            majority.extend(MajorityRow(filter=name, **row) for row in votes)
        metrics += [MetricRow(**head, num_fewshot=options.num_fewshot, **row) for row in rows]
    if chosen:
        return Report(tuple(metrics), (), len(groups), len(scores), incomplete)
    metrics += [
        MetricRow(
            task=task,
            version=version,
            filter="none",
            num_fewshot=options.num_fewshot,
            metric=metric,
            higher_is_better=False,
            **mean_row([_share(list(map(is_cut, group))) for group in groups], clusters=clusters),
        )
        for metric, is_cut in _TRUNCATED.items()
        if metric == "truncated" or any(sample.closed is not None for sample in scores)
    ]
    return Report(tuple(metrics), tuple(majority), len(groups), len(scores), incomplete)


# A sample whose reasoning never ended has no answer, whatever its finish reason.
_TRUNCATED: Final[Mapping[str, Callable[[SampleScore], bool]]] = {
    "truncated": lambda sample: sample.closed is False or sample.finish_reason == "length",
    "truncated_thinking": lambda sample: sample.closed is False,
    "truncated_answer": lambda sample: (
        sample.finish_reason == "length" and sample.closed is not False
    ),
}


def _group(
    scores: Sequence[SampleScore], problem_ids: Sequence[str]
) -> dict[str, list[SampleScore]]:
    samples_of: dict[str, list[SampleScore]] = {problem_id: [] for problem_id in problem_ids}
    for sample in scores:
        if (group := samples_of.get(sample.problem_id)) is None:
            name = sample.problem_id
            raise InputError(f"a sample belongs to problem {name!r}, which is not in problem_ids")
        group.append(sample)
    for problem_id, group in samples_of.items():
        indices = [sample.sample_index for sample in group]
        if len(set(indices)) < len(indices):
            twice = next(i for i in indices if indices.count(i) > 1)
            raise InputError(f"problem {problem_id!r} has sample {twice} twice")
    return samples_of


def clusters_of(
    problems: Iterable[HasGroup], problem_ids: Sequence[str]
) -> list[tuple[Hashable, ...]] | None:
    """Return the cluster of each problem id for error bars; None if no problem has a group."""
    return find_clusters({problem.id: problem.group for problem in problems}, problem_ids)


def _filter_rows(
    tallies: Sequence[Tally], options: ReportOptions, clusters: Clusters
) -> list[dict[str, Any]]:
    counts = [(tally.num_samples, sum(tally.correct)) for tally in tallies]
    shares = [right / num for num, right in counts]
    rows = [{"metric": "exact_match", **mean_row(shares, None, clusters)}]
    pass_ks = default_pass_ks(options.num_samples) if options.pass_ks is None else options.pass_ks
    for k in pass_ks:
        values = [pass_at_k(num, right, k) for num, right in counts]
        rows.append({"metric": f"pass@{k}", **mean_row(values, k, clusters)})
    for k in options.pass_hat_ks:
        for name, values in reliability_values(counts, k).items():
            rows.append({"metric": name, **mean_row(values, k, clusters)})
    invalid = [tally.invalid / num for tally, (num, _) in zip(tallies, counts, strict=True)]
    rows.append(
        {"metric": "invalid", **mean_row(invalid, None, clusters), "higher_is_better": False}
    )
    return rows


def _choice_rows(
    groups: Sequence[Sequence[SampleScore]], name: str, clusters: Clusters
) -> list[dict[str, Any]]:
    right = [_share([sample.verdicts[name].correct for sample in group]) for group in groups]
    rows = [{"metric": "acc", **mean_row(right, None, clusters)}]
    if all(sample.by_length for group in groups for sample in group):
        right = [_share([sample.by_length[name].correct for sample in group]) for group in groups]
        rows.append({"metric": "acc_norm", **mean_row(right, None, clusters)})
    return rows


def _majority(
    tallies: Sequence[Tally], options: ReportOptions, clusters: Clusters
) -> list[dict[str, Any]]:
    rows = []
    ks = default_maj_ks(options.num_samples) if options.maj_ks is None else options.maj_ks
    votes = [tally.votes_at(tuple(ks)) for tally in tallies]
    for column, k in enumerate(ks):
        shares = [problem_votes[column][0] for problem_votes in votes]
        row = {"k": k, **mean_row(shares, k, clusters), "tie_rate": None}
        if row["value"] is not None:
            row["tie_rate"] = estimate([problem_votes[column][1] for problem_votes in votes]).value
        rows.append(row)
    return rows


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def mean_row(
    values: Sequence[float], k: int | None = None, clusters: Clusters = None
) -> dict[str, Any]:
    """Return the fields of a MetricRow that follow from per-problem values.

    Args:
        values: One value for each problem; NaN if the problem has too few samples.
        k: The k of the metric, for the reason why it is undefined; None for metrics without k.
        clusters: The cluster of each problem, from `clusters_of`.
    """
    if not values:
        return {"value": None, "reason": "no samples"}
    undefined = sum(math.isnan(value) for value in values)
    if undefined:
        reason = f"{undefined} of {len(values)} problems have fewer than {k} samples"
        return {"value": None, "reason": reason}
    mean = estimate(values, clusters)
    return {"value": mean.value, "stderr": mean.stderr, "low": mean.low, "high": mean.high}
