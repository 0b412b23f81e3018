"""The variances within and between problems of runs, for power and for widths of intervals."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from treegen.errors import InputError, arg
from treegen.evals.statistics.power import (
    MOST_PROBLEMS,
    Variances,
    correlation_of,
    difference_for,
    estimate_variances,
    limit_variances,
    power,
    predict_half_width,
    problems_for,
    problems_for_half_width,
)
from treegen.report.tables import PrintableTable
from treegen.report.view import RunView

_MIN_VISIBLE_CHANGE: Final = 0.005  # smaller changes of a variance do not change the table
_MIN_PROBLEMS: Final = 50  # with fewer problems, treegen calls its estimates rough
_DEFAULT_VARIANCE: Final = 0.1  # the default of both variances
_DEFAULT_CORRELATION: Final = 0.5  # the default correlation


@dataclass(frozen=True, slots=True)
class VariancesSource:
    """Where the values of `Variances` come from: the user, runs, or defaults."""

    num_problems: int | None = None
    """The number of problems from which treegen estimated values; None if it estimated none."""
    estimates_correlation: bool = False
    """Whether the correlation is estimated."""
    assumed: tuple[str, ...] = ()
    """The names of the values that have their default."""

    @property
    def is_rough(self) -> bool:
        """Whether some values are estimated from few problems."""
        return self.num_problems is not None and self.num_problems < _MIN_PROBLEMS

    def describe_roughness(self) -> str:
        """Return a sentence about estimates from few problems; "" without such estimates."""
        if not self.is_rough:
            return ""
        what = "variances and the correlation" if self.estimates_correlation else "variances"
        return (
            f"all numbers are rough, because the {what} are estimated from only "
            f"{self.num_problems} problems"
        )


def choose_variances(
    runs: Sequence[RunView],
    between: float | None = None,
    within: float | None = None,
    correlation: float | None = None,
) -> tuple[Variances, VariancesSource]:
    """Return the variances for a power analysis, and where each comes from.

    If a run is unfinished, its problems with a single sample are left out.

    Args:
        runs: No, one or two runs; treegen can estimate the correlation only from two.
        between: The variance between problems; None estimates it from `runs`, or takes 0.1.
        within: The variance within problems; None estimates it from `runs`, or takes 0.1.
        correlation: The correlation of the accuracies of two runs by problem; None estimates it
            from `runs`, or takes 0.5.

    Raises:
        InputError: there are more than two runs, a run is not scored or has fewer than two
            problems, or two runs have fewer than two problems in common.
    """
    if len(runs) > 2:
        raise InputError(f"{arg('runs=')} must be one or two runs, got {len(runs)}")
    is_known = None not in (between, within) and (len(runs) < 2 or correlation is not None)
    counts_of_runs = []
    for run in () if is_known else runs:
        min_samples = min(2, run.fixed or run.num_samples)
        counts = {i: c for i, c in _count_correct(run).items() if c[1] >= min_samples}
        if len(counts) < 2:
            raise InputError(
                "variances need at least two problems with two or more samples, and the run "
                f"{run.path} has {len(counts)}; choose another run, or pass {arg('between=')} and "
                f"{arg('within=')}"
            )
        counts_of_runs.append(counts)
    if len(counts_of_runs) == 2:
        shared = [i for i in counts_of_runs[0] if i in counts_of_runs[1]]
        if len(shared) < 2:
            raise InputError("the runs have fewer than two problems in common; choose other runs")
        counts_of_runs = [{i: counts[i] for i in shared} for counts in counts_of_runs]
    estimates = [estimate_variances(list(counts.values())) for counts in counts_of_runs]
    measured = list(map(fmean, zip(*estimates, strict=True)))
    measured = measured or [_DEFAULT_VARIANCE, _DEFAULT_VARIANCE]
    chosen = {"between": between, "within": within, "correlation": correlation}
    num_needed = {"between": 1, "within": 1, "correlation": 2}  # runs that estimate the value
    source = VariancesSource(
        num_problems=min(map(len, counts_of_runs), default=None),
        estimates_correlation=correlation is None and len(counts_of_runs) == 2,
        assumed=tuple(
            name
            for name, value in chosen.items()
            if value is None and len(counts_of_runs) < num_needed[name]
        ),
    )
    if correlation is None:
        both = [list(counts.values()) for counts in counts_of_runs]
        correlation = correlation_of(both[0], both[1]) if len(both) == 2 else _DEFAULT_CORRELATION
    variances = Variances(
        between=measured[0] if between is None else between,
        within=measured[1] if within is None else within,
        correlation=correlation,
    )
    return variances, source


def count_problems_and_samples(runs: Sequence[RunView]) -> tuple[int | None, list[int]]:
    """Return the number of problems that all runs have, and each run's samples per problem.

    Args:
        runs: No, one or two runs. Without runs, the number is None.
    """
    shared = [{problem.id for problem in run.problems} for run in runs]
    num_problems = len(set.intersection(*shared)) if shared else None
    return num_problems, [run.fixed or run.num_samples for run in runs]


def find_accuracy(runs: Sequence[RunView], variances: Variances) -> float:
    """Return the accuracy of a run; without a run, the lower accuracy that fits the variances.

    The variances are those of an accuracy p and of 1 - p.

    Args:
        runs: No run, or one run.
        variances: The variances.
    """
    if len(runs) > 1:
        raise InputError(
            f"{arg('half_width=')} needs at most one run in {arg('runs=')}, got {len(runs)}"
        )
    if runs:
        return fmean(right / num for right, num in _count_correct(runs[0]).values())
    return 0.5 - math.sqrt(max(0.0, 0.25 - variances.between - variances.within))


@dataclass(frozen=True, slots=True)
class PowerQuery:
    """Query of the number of problems that detect a difference of two accuracies.

    The test is that of `treegen compare`.
    """

    difference: float
    """The difference of the accuracies, above 0."""
    power: float
    """The probability of detecting the difference."""
    alpha: float
    """The probability of a false positive."""
    num_problems: int | None = None
    """The number of available problems; None asks only how many are needed."""
    source: VariancesSource = VariancesSource()
    """Where the variances and the correlation come from."""

    def rows(self, variances: Variances, ks: Iterable[int]) -> list[dict[str, Any]]:
        """Return the problems needed, and the available ones' power, by number of samples.

        If the correlation is estimated from few problems, each row also has the number of problems
        that the default correlation gives.
        """
        rows: list[dict[str, Any]] = []
        for k in ks:
            needed = problems_for(variances, self.difference, k, self.power, self.alpha)
            row: dict[str, Any] = {"num_samples": k, "problems_needed": needed}
            if self._shows_default:
                row["problems_needed_by_default"] = problems_for(
                    replace(variances, correlation=_DEFAULT_CORRELATION),
                    self.difference,
                    k,
                    self.power,
                    self.alpha,
                )
            if (num := self.num_problems) is not None:
                row["power"] = power(variances, self.difference, num, k, self.alpha)
                row["difference_found"] = difference_for(variances, num, k, self.power, self.alpha)
            rows.append(row)
        return rows

    def limits(self, variances: Variances, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the variances for the requested difference and for the largest one found."""
        return [
            {"difference": difference, **asdict(limit_variances(variances, difference))}
            for difference in self._list_differences(rows)
        ]

    @property
    def _shows_default(self) -> bool:
        return self.source.is_rough and self.source.estimates_correlation

    def _list_differences(self, rows: list[dict[str, Any]]) -> list[float]:
        """Return the requested difference and the largest difference found, if there is one."""
        differences = [
            row["difference_found"] for row in rows if row.get("difference_found") is not None
        ]
        return [self.difference, *([max(differences)] if differences else [])]

    def build_table(self, variances: Variances, rows: list[dict[str, Any]]) -> str:
        """Return the rows as a table."""
        columns: dict[str, str | Callable[[dict[str, Any]], str]] = {
            "Samples each": "{0[num_samples]:,}",
            f"Problems for {self.difference:g}": "{0[problems_needed]:,}",
        }
        if self._shows_default:
            columns[f"With correlation {_DEFAULT_CORRELATION:.2f}"] = (
                "{0[problems_needed_by_default]:,}"
            )
        if self.num_problems is not None:
            columns[f"Power with {self.num_problems:,}"] = "{0[power]:.3f}"
            columns[f"Difference found with {self.num_problems:,}"] = _format_difference
        limits = (describe_limits(variances, d) for d in self._list_differences(rows))
        lines = filter(None, (self.source.describe_roughness(), *limits))
        is_assumed = "correlation" in self.source.assumed
        assumed = " (assumed; two --run estimate it)" if is_assumed else ""
        return (
            f"{_describe_variances(variances, self.source)}, "
            f"correlation of the runs {variances.correlation:.2f}{assumed}\n"
            f"the test of treegen compare, alpha {self.alpha:g}, power {self.power:g}\n\n"
            f"{PrintableTable.of(rows, columns, lines=lines)}"
        )


def describe_limits(variances: Variances, difference: float) -> str:
    """Return which variances are too large for a difference, and the values that treegen uses.

    Empty if the difference allows all variances.

    Args:
        variances: The variances.
        difference: The difference of two accuracies.
    """
    limited = limit_variances(variances, difference)
    parts = []
    for name, what in (
        ("between", "a variance between problems"),
        ("within", "a variance within problems"),
        ("correlation", "a correlation of the runs"),
    ):
        before, now = getattr(variances, name), getattr(limited, name)
        if abs(before - now) > _MIN_VISIBLE_CHANGE:
            parts.append(f"{what} of at {'most' if now < before else 'least'} {now:.3g}")
    if not parts:
        return ""
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    value = "this value" if len(parts) == 1 else "these values"
    return (
        f"a difference of {difference:.4g} allows {listed}; the table uses {value} "
        "for this difference"
    )


@dataclass(frozen=True, slots=True)
class PrecisionQuery:
    """Query of the number of problems for a half width of the 95% interval of one accuracy."""

    half_width: float
    """The distance from the accuracy to the farther end of its interval."""
    accuracy: float
    """The accuracy of the run."""
    num_problems: int | None = None
    """The number of available problems; None asks only how many are needed."""
    source: VariancesSource = VariancesSource()
    """Where the variances come from."""

    def rows(self, variances: Variances, ks: Iterable[int]) -> list[dict[str, Any]]:
        """Return the problems needed, and the available ones' half width, by number of samples."""
        rows: list[dict[str, Any]] = []
        for k in ks:
            needed = problems_for_half_width(variances, self.accuracy, k, self.half_width)
            row: dict[str, Any] = {"num_samples": k, "problems_needed": needed}
            if (num := self.num_problems) is not None:
                if not 1 <= num <= MOST_PROBLEMS:
                    raise InputError(
                        f"{arg('n_problems')} must be at least 1 and at most {MOST_PROBLEMS:,}, "
                        f"got {num!r:.40}"
                    )
                row["half_width"] = predict_half_width(variances, self.accuracy, num, k)
            rows.append(row)
        return rows

    def build_table(self, variances: Variances, rows: list[dict[str, Any]]) -> str:
        """Return the rows as a table."""
        columns = {
            "Samples each": "{0[num_samples]:,}",
            f"Problems for +-{self.half_width:g}": "{0[problems_needed]:,}",
        }
        if self.num_problems is not None:
            columns[f"Half width with {self.num_problems:,}"] = "{0[half_width]:.4f}"
        rough = self.source.describe_roughness()
        derived = " (from the variances)" if self.accuracy == find_accuracy((), variances) else ""
        values = _describe_variances(variances, self.source)
        return (
            f"accuracy {self.accuracy:.3f}{derived}, {values}\n"
            "the 95% interval of the accuracy of one run\n\n"
            f"{PrintableTable.of(rows, columns, lines=filter(None, [rough]))}"
        )


def _describe_variances(variances: Variances, source: VariancesSource) -> str:
    values = {"between problems": "between", "within": "within"}
    parts = [
        f"{label} {getattr(variances, name):.4f}{' (assumed)' if name in source.assumed else ''}"
        for label, name in values.items()
    ]
    return f"variance {', '.join(parts)}"


def _format_difference(row: dict[str, Any]) -> str:
    difference = row["difference_found"]
    return "none" if difference is None else f"{difference:.4f}"


def _count_correct(view: RunView) -> dict[str, tuple[int, int]]:
    """Return the number of correct samples and of all samples of each problem, by problem id."""
    if not view.filters:
        raise InputError(view.why_unscored)
    verdicts = view.verdicts(view.filters[0], fixed=True)
    return {
        problem_id: (sum(v.correct for v in problem_verdicts), len(problem_verdicts))
        for problem_id, problem_verdicts in verdicts.items()
    }
