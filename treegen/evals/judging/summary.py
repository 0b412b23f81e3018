"""Summary of judgements: means with intervals, variances, strengths in pairs, and agreement."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from treegen.errors import InputError, arg
from treegen.evals.judging.components import (
    Cells,
    design_of,
    estimate_components,
    make_cells,
)
from treegen.evals.judging.interval import CorrectedMean, Mean, correct_mean, mean_of
from treegen.evals.judging.judgements import JudgementSet, get_cells, order_table, pairs_of
from treegen.evals.judging.jury import check_jury, cohens_kappa, jury_of, krippendorffs_alpha
from treegen.evals.judging.published_scores import official_tables
from treegen.evals.judging.sample_size import RequiredNumber, required_numbers
from treegen.evals.judging.summary_tables import (
    AgreementRow,
    list_notices,
    make_agreement_table,
    make_corrected_table,
    make_criterion_table,
    make_mean_table,
    make_variance_table,
    make_verdict_table,
    make_votes_table,
)
from treegen.evals.statistics.estimators import Estimate, mean_by
from treegen.evals.statistics.reliability import effective_votes
from treegen.evals.statistics.tables import Table

Combine = Literal["mean", "majority"]


@dataclass(frozen=True, repr=False)
class Summary:
    """Results of a jury: judge runs that differ only in their judge.

    Values are from 0, the smallest value of the rubric's choices, to 1, the largest. For pairs, 1
    means that the answer of the first run is better in either order.
    """

    title: str
    """The name of the rubric, and how verdicts were obtained."""
    judged: tuple[JudgementSet, ...]
    """The judge runs."""
    cells: Cells | None = None
    """The values, with problem, answer, judge and wording."""
    mean: Mean | None = None
    """The mean over problems; for pairs, of the first two runs. None without readable verdicts."""
    jury: Mean | None = None
    """The mean of the combined judges; None for a single judge."""
    variances: Mapping[str, float | None] = field(default_factory=dict)
    """The variance of each factor; None if the design does not determine it."""
    by_problem: Mapping[str, float] = field(default_factory=dict)
    """The mean of each problem."""
    tables: tuple[Table, ...] = ()
    """All results as tables."""
    corrected: CorrectedMean | None = None
    """The mean corrected by labels of people; None without labels."""
    notices: tuple[str, ...] = ()
    """Sentences about verdicts that need attention."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further results for `to_json`."""

    def __repr__(self) -> str:
        mean = "no readable verdicts"
        if self.mean is not None:
            ends = f"{self.mean.low:.3f} to {self.mean.high:.3f}"
            mean = f"mean {self.mean.value:.3f}, 95% interval {ends}"
        judges = ", ".join(str(judge_run.judging.judge) for judge_run in self.judged)
        return f"Summary({self.title!r} by {judges}: {mean})"

    @property
    def key(self) -> tuple[str, ...]:
        """A key that is equal for judge runs of other runs with the same rubric and judges.

        Judge runs of pairs have a key of their own.
        """
        first = self.judged[0].judging.settings
        if first.rubric.pairs:
            return (self.judged[0].judging.name,)
        judges = (judge_run.judging.fingerprint for judge_run in self.judged)
        return (repr(first.identity()), str(first.wordings), *judges)

    def needs(self, half_width: float) -> list[RequiredNumber]:
        """Return the numbers of problems, answers and so on for an interval of this half width.

        See `sample_size.required_numbers`.
        """
        if self.cells is None or self.mean is None:
            raise InputError(
                "all verdicts are unreadable, so treegen cannot compute how many problems or "
                f"judges are needed; try another {arg('judge=')}"
            )
        repeats, variance = _repeats(self.judged)
        return required_numbers(
            self.variances,
            design_of(self.cells),
            half_width,
            self.mean,
            repeats=repeats,
            repeat_variance=variance,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain dicts and lists."""
        return {
            "title": self.title,
            "judges": [judge_run.judging.judge for judge_run in self.judged],
            "judgings": [judge_run.judging.name for judge_run in self.judged],
            "judgements": sum(len(judge_run.judgements) for judge_run in self.judged),
            "unreadable": sum(judge_run.unreadable for judge_run in self.judged),
            "mean": None if self.mean is None else asdict(self.mean),
            "jury": None if self.jury is None else asdict(self.jury),
            "variances": dict(self.variances),
            "corrected": None if self.corrected is None else asdict(self.corrected),
            "tables": [asdict(table) for table in self.tables],
            "notices": list(self.notices),
            **self.more,
        }


def summarize(
    judged: Sequence[JudgementSet],
    *,
    groups: Mapping[str, str] | None = None,
    labels: Mapping[tuple[str, int], float] | None = None,
    weights: Sequence[float] | None = None,
    combine: Combine = "mean",
) -> Summary:
    """Return the results of a jury.

    Args:
        judged: Judge runs that differ only in their judge.
        groups: The cluster of each problem, by id; empty for a problem without a cluster. None
            treats problems as independent.
        labels: Labels by people, by (problem, sample), from 0 to 1; None for no correction.
        weights: The weight of each judge; None for equal weights.
        combine: How the judges' values are combined: "mean" or "majority"; see `jury_of`.

    Raises:
        InputError: the weights do not fit the judges, no label is of a judged answer, no pair has
            readable verdicts in both orders, or a library is not installed.
    """
    check_jury(len(judged), weights, combine)
    first = judged[0].judging
    rubric, names = first.settings.rubric, [judge_run.judging.judge for judge_run in judged]
    rows = [row for number, judge_run in enumerate(judged) for row in _rows_of(judge_run, number)]
    title = f"{rubric.name}, {first.settings.verdicts}"
    if not rows:
        notices = list_notices(judged, None)
        table = make_verdict_table(judged, notices)
        return Summary(title, tuple(judged), tables=(table,), notices=tuple(notices))
    values = make_cells(rows)
    mean, variances = _mean_of_rows(rows, groups), estimate_components(values)
    jury = None
    if len(judged) > 1:
        jury = _mean_of_rows(jury_of(rows, weights, combine), groups)
    more_tables, more = _scores_of_kind(judged, weights, groups)
    notices = list_notices(judged, mean)
    tables = [
        make_mean_table(judged, _list_means(judged, mean, jury, combine, groups), notices),
        make_verdict_table(judged),
        *_list_criterion_tables(judged, groups),
        make_variance_table(variances, values, rubric.name),
        *more_tables,
    ]
    agreement = _agreement(rows, names)
    corrected = None
    if labels is not None:
        corrected, with_people, num_unjudged = _with_labels(rows, labels)
        tables.append(make_corrected_table(corrected, num_unjudged))
        if (worth := _effective_votes(rows, labels)) is not None:
            more["effective_votes"] = asdict(worth)
            tables.append(make_votes_table(worth, len(judged)))
        agreement.append((with_people, 2))
    if agreement:
        tables.append(make_agreement_table(rubric.name, agreement))
    return Summary(
        title=title,
        judged=tuple(judged),
        cells=values,
        mean=mean,
        jury=jury,
        variances=variances,
        by_problem=mean_by((str(problem), value) for value, problem, *_ in rows),
        tables=tuple(tables),
        corrected=corrected,
        notices=tuple(notices),
        more=more,
    )


def _scores_of_kind(
    judged: Sequence[JudgementSet],
    weights: Sequence[float] | None,
    groups: Mapping[str, str] | None,
) -> tuple[list[Table], dict[str, Any]]:
    """Return the results that only some rubrics have, as tables and as an object for JSON.

    Args:
        judged: Judge runs that differ only in their judge.
        weights: The weight of each judge; None for equal weights.
        groups: As for `summarize`.
    """
    tables, more = official_tables(judged)
    if judged[0].judging.settings.rubric.pairs:
        pairs = pairs_of(judged, weights, groups)
        by_chance = judged[0].judging.settings.verdicts == "likelihood"
        order = order_table(pairs.position, by_chance=by_chance)
        return [pairs.table, order, *tables], {**pairs.to_json(), **more}
    return tables, more


def _mean_of_rows(rows: Sequence[tuple[Any, ...]], groups: Mapping[str, str] | None) -> Mean | None:
    """Return the mean of (value, problem, ...) rows; None without rows.

    Args:
        rows: As for `jury_of`.
        groups: As for `summarize`.
    """
    if not rows:
        return None
    clusters = None
    if groups is not None:
        problem_ids = dict.fromkeys(str(row[1]) for row in rows)
        clusters = {i: groups.get(p, "") for i, p in enumerate(problem_ids)}
    return mean_of(make_cells(rows), clusters)


def _list_means(
    judged: Sequence[JudgementSet],
    mean: Mean | None,
    jury: Mean | None,
    combine: Combine,
    groups: Mapping[str, str] | None,
) -> list[tuple[str, Mean | None]]:
    """Return the name and the mean of each row of the table of means.

    Args:
        judged: Judge runs that differ only in their judge.
        mean: The mean over all judges.
        jury: The mean of the combined judges; None for a single judge.
        combine: How the judges' values are combined.
        groups: As for `summarize`.

    Returns:
        (name, mean) pairs; the mean of a judge without readable verdicts is None.
    """
    if jury is None:
        return [(judged[0].judging.judge, mean)]
    by_judge = [(run.judging.judge, _mean_of_rows(_rows_of(run, 0), groups)) for run in judged]
    return [("all", mean), (f"jury, {combine}", jury), *by_judge]


def _list_criterion_tables(
    judged: Sequence[JudgementSet], groups: Mapping[str, str] | None
) -> list[Table]:
    """Return the table of the mean of each criterion; empty for a rubric without several criteria.

    Args:
        judged: Judge runs that differ only in their judge.
        groups: As for `summarize`.
    """
    rubric = judged[0].judging.settings.rubric
    if len(rubric.criteria) < 2:
        return []
    means = []
    for criterion in range(len(rubric.criteria)):
        rows = [row for n, run in enumerate(judged) for row in _rows_of(run, n, criterion)]
        means.append(_mean_of_rows(rows, groups))
    return [make_criterion_table(rubric, means)]


def _rows_of(
    judged: JudgementSet, number: int, criterion: int | None = None
) -> list[tuple[float, Any, Any, int, Any]]:
    """Return (value, problem, answer, number of the judge, wording) of a judge run.

    For pairs these are the values of the first two runs.

    Args:
        judged: The judge run.
        number: The number of the judge.
        criterion: The number of the only criterion to use; None for all.
    """
    pairs = judged.judging.settings.rubric.pairs
    values = judged.values if criterion is None else get_cells(judged, criterion)
    return [
        (value, problem, (problem, key), number, wording)
        for (problem, key, wording), value in values.items()
        if not pairs or key[0] == 1  # runs 0 and 1; see `get_cells`
    ]


def _agreement(
    rows: Sequence[tuple[Any, ...]], names: Sequence[str]
) -> list[tuple[AgreementRow, int]]:
    """Return the agreement between judges, and between wordings.

    Args:
        rows: (value, problem, answer, number of the judge, wording).
        names: The judges.

    Returns:
        Rows of the table of agreement, and the number of raters of each.
    """
    agreement_rows: list[tuple[AgreementRow, int]] = []
    for column, what in ((3, "judges"), (4, "wordings")):
        levels = sorted({row[column] for row in rows})
        if len(levels) < 2:
            continue
        ratings = mean_by(((row[2], row[column]), row[0]) for row in rows)
        by_answer: dict[Hashable, dict[int, float]] = defaultdict(dict)
        for (answer, level), rating in ratings.items():
            by_answer[answer][level] = rating
        units = list(by_answer.values())
        kappa = None
        if len(levels) == 2:
            kappa = _kappa([(u[levels[0]], u[levels[1]]) for u in units if len(u) == 2])
        alpha = krippendorffs_alpha([list(unit.values()) for unit in units])
        label = " and ".join(names) if what == "judges" and len(names) == 2 else what
        agreement_rows.append(((label, kappa, alpha, len(units)), len(levels)))
    return agreement_rows


def _kappa(both: Sequence[tuple[float, float]]) -> float | None:
    """Return kappa with quadratic weights; None without values.

    Values are rounded to hundredths, so that equal means count as equal.
    """
    if not both:
        return None
    rounded = [(round(a, 2), round(b, 2)) for a, b in both]
    return cohens_kappa([a for a, _ in rounded], [b for _, b in rounded])


def _with_labels(
    rows: Sequence[tuple[Any, ...]], labels: Mapping[tuple[str, int], float]
) -> tuple[CorrectedMean, AgreementRow, int]:
    """Return the mean corrected by labels, and the agreement of judges with people.

    The last value is the number of labels of answers without a judgement.
    """
    judged = mean_by(((problem, index), value) for value, problem, (_, (_, index)), *_ in rows)
    if not (both := [key for key in labels if key in judged]):
        raise InputError(
            "no judged answer has a label; use a labels file for the answers of this run"
        )
    labelled = mean_by((key[0], labels[key]) for key in both)
    unused = len(labels) - len(both)
    if len(labelled) < 2 and unused:
        raise InputError(
            f"a correction requires labels for at least 2 problems, got {len(labelled)}; "
            f"{unused:,} of {len(labels):,} labels are for answers that are not judged, so judge "
            "the run first, or label other answers"
        )
    unlabelled = mean_by((key[0], v) for key, v in judged.items() if key[0] not in labelled)
    corrected = correct_mean(
        list(labelled.values()),
        list(mean_by((key[0], judged[key]) for key in both).values()),
        list(unlabelled.values()),
    )
    pairs = [(labels[key], judged[key]) for key in both]
    hard = (
        [(a, float(round(b))) for a, b in pairs] if {a for a, _ in pairs} <= {0.0, 1.0} else pairs
    )
    alpha = krippendorffs_alpha(pairs)
    row = "people and judges", _kappa(hard), alpha, len(pairs)
    return corrected, row, unused


def _effective_votes(
    rows: Sequence[tuple[Any, ...]], labels: Mapping[tuple[str, int], float]
) -> Estimate | None:
    """Return how many independent judges the jury is worth on the labelled answers.

    Answers that some judge has not read are left out.

    Args:
        rows: (value, problem, answer, number of the judge, wording), as for `jury_of`.
        labels: Labels by people, by (problem, sample).
    """
    ratings = mean_by(
        (((problem, index), judge), value)
        for value, problem, (_, (_, index)), judge, _ in rows
        if (problem, index) in labels
    )
    judges = range(1 + max(row[3] for row in rows))
    answers = dict.fromkeys(answer for answer, _ in ratings)
    complete = [answer for answer in answers if all((answer, j) in ratings for j in judges)]
    errors = [[ratings[answer, j] - labels[answer] for j in judges] for answer in complete]
    return effective_votes(errors, [problem for problem, _ in complete])


def _repeats(judged: Sequence[JudgementSet]) -> tuple[int, float]:
    """Return the mean number of verdicts of a cell, and their variance within a cell."""
    rubric = judged[0].judging.settings.rubric
    span = rubric.max_value - rubric.min_value
    repeats_of_case: dict[Hashable, list[float]] = defaultdict(list)
    for number, judge_run in enumerate(judged):
        for one in judge_run.judgements:
            if one.value is not None:
                key = number, one.problem_id, one.shown, one.wording, one.criterion
                repeats_of_case[key].append((one.value - rubric.min_value) / span)
    several = [values for values in repeats_of_case.values() if len(values) > 1]
    if not several:
        return 1, 0.0
    variance = float(np.mean([np.var(values, ddof=1) for values in several]))
    return max(
        1, round(float(np.mean([len(values) for values in repeats_of_case.values()])))
    ), variance
