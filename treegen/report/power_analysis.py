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

_VISIBLE: Final = 0.005  # smaller changes of variances do not change the table
_ROUGH: Final = 50  # problems below which estimates of the variances and the correlation are rough
_VARIANCE: Final = 0.1  # the default of both variances
_CORRELATION: Final = 0.5  # the default correlation


@dataclass(frozen=True, slots=True)
class SpreadSource:
    """Which values of `Variances` are given, which are estimated from runs, which are assumed."""

    num_problems: int | None = None
    """The number of problems that some values are estimated from; None if none is estimated."""
    estimates_correlation: bool = False
    """Whether the correlation is estimated."""
    assumed: tuple[str, ...] = ()
    """The names of the values that have their default."""

    @property
    def is_rough(self) -> bool:
        """Whether some values are estimated from few problems."""
        return self.num_problems is not None and self.num_problems < _ROUGH

    def describe_roughness(self) -> str:
        """Return the sentence on estimates from few problems; "" if there are none."""
        if not self.is_rough:
            return ""
        what = "variances and the correlation" if self.estimates_correlation else "variances"
        return (
            f"all numbers are rough, because the {what} are estimated from only "
            f"{self.num_problems} problems"
        )


def spread_of_runs(
    runs: Sequence[RunView],
    between: float | None = None,
    within: float | None = None,
    correlation: float | None = None,
) -> tuple[Variances, SpreadSource]:
    """Return the variances that are given, else measured on runs, else assumed.

    Args:
        runs: None, one or two runs; two also give the correlation.
        between: The variance between problems; None measures it, or assumes 0.1.
        within: The variance within problems; None measures it, or assumes 0.1.
        correlation: The correlation of the runs' accuracies by problem; None measures it, or
            assumes 0.5.

    Returns:
        The values, and where each comes from.
    """
    if len(runs) > 2:
        raise InputError(f"{arg('runs=')} must be one or two runs, got {len(runs)}")
    is_known = None not in (between, within) and (len(runs) < 2 or correlation is not None)
    rights_of_runs = [] if is_known else [_read_correctness(run) for run in runs]
    if len(rights_of_runs) == 2:
        shared = [i for i in rights_of_runs[0] if i in rights_of_runs[1]]
        if len(shared) < 2:
            raise InputError("the runs have fewer than two problems in common; choose other runs")
        rights_of_runs = [{i: rights[i] for i in shared} for rights in rights_of_runs]
    variances = [estimate_variances(list(rights.values())) for rights in rights_of_runs]
    means = [sum(column) / len(variances) for column in zip(*variances, strict=True)]
    measured = means or [_VARIANCE, _VARIANCE]
    chosen = {"between": between, "within": within, "correlation": correlation}
    num_needed = {"between": 1, "within": 1, "correlation": 2}  # runs that estimate the value
    source = SpreadSource(
        num_problems=min(map(len, rights_of_runs), default=None),
        estimates_correlation=correlation is None and len(rights_of_runs) == 2,
        assumed=tuple(
            name
            for name, value in chosen.items()
            if value is None and len(rights_of_runs) < num_needed[name]
        ),
    )
    if correlation is None:
        both = [list(rights.values()) for rights in rights_of_runs]
        correlation = correlation_of(both[0], both[1]) if len(both) == 2 else _CORRELATION
    spread = Variances(
        between=measured[0] if between is None else between,
        within=measured[1] if within is None else within,
        correlation=correlation,
    )
    return spread, source


def size_of_runs(runs: Sequence[RunView]) -> tuple[int | None, list[int]]:
    """Return the number of problems that all runs have, and the runs' samples of each problem.

    Args:
        runs: None, one or two runs. Without runs the number is None.
    """
    shared = [{problem.id for problem in run.problems} for run in runs]
    num_problems = len(set.intersection(*shared)) if shared else None
    return num_problems, [run.fixed or run.num_samples for run in runs]


def find_accuracy(runs: Sequence[RunView], spread: Variances) -> float:
    """Return the accuracy of a run; without a run, the lower of the two that fit the variances.

    Args:
        runs: None or one run.
        spread: The variances.
    """
    if len(runs) > 1:
        raise InputError(
            f"{arg('half_width=')} needs at most one run in {arg('runs=')}, got {len(runs)}"
        )
    if runs:
        return fmean(right / num for right, num in _read_correctness(runs[0]).values())
    return 0.5 - math.sqrt(max(0.0, 0.25 - spread.between - spread.within))


@dataclass(frozen=True, slots=True)
class PowerQuery:
    """Query of a power analysis: the difference of accuracies to detect, and the power.

    The test is that of `treegen compare`.
    """

    difference: float
    power: float
    alpha: float
    num_problems: int | None = None
    """The number of available problems; None asks only how many are needed."""
    source: SpreadSource = SpreadSource()
    """Where the variances and the correlation come from."""

    def rows(self, spread: Variances, ks: Iterable[int]) -> list[dict[str, Any]]:
        """Return the problems needed, and the available ones' power, by number of samples.

        If the correlation is estimated from few problems, each row also has the number of problems
        that the default correlation gives.
        """
        rows: list[dict[str, Any]] = []
        for k in ks:
            needed = problems_for(spread, self.difference, k, self.power, self.alpha)
            row: dict[str, Any] = {"num_samples": k, "problems_needed": needed}
            if self._shows_default:
                row["problems_needed_by_default"] = problems_for(
                    replace(spread, correlation=_CORRELATION),
                    self.difference,
                    k,
                    self.power,
                    self.alpha,
                )
            if (num := self.num_problems) is not None:
                row["power"] = power(spread, self.difference, num, k, self.alpha)
                row["difference_found"] = difference_for(spread, num, k, self.power, self.alpha)
            rows.append(row)
        return rows

    def limits(self, spread: Variances, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the variances for the requested difference and for the largest one found."""
        return [
            {"difference": difference, **asdict(limit_variances(spread, difference))}
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

    def build_table(self, spread: Variances, rows: list[dict[str, Any]]) -> str:
        """Return the rows as a table."""
        columns: dict[str, str | Callable[[dict[str, Any]], str]] = {
            "Samples each": "{0[num_samples]:,}",
            f"Problems for {self.difference:g}": "{0[problems_needed]:,}",
        }
        if self._shows_default:
            columns[f"With correlation {_CORRELATION:.2f}"] = "{0[problems_needed_by_default]:,}"
        if self.num_problems is not None:
            columns[f"Power with {self.num_problems:,}"] = "{0[power]:.3f}"
            columns[f"Difference found with {self.num_problems:,}"] = _format_difference
        limits = (describe_limits(spread, d) for d in self._list_differences(rows))
        lines = filter(None, (self.source.describe_roughness(), *limits))
        is_assumed = "correlation" in self.source.assumed
        assumed = " (assumed; two --run estimate it)" if is_assumed else ""
        return (
            f"{_describe_spread(spread, self.source)}, "
            f"correlation of the runs {spread.correlation:.2f}{assumed}\n"
            f"the test of treegen compare, alpha {self.alpha:g}, power {self.power:g}\n\n"
            f"{PrintableTable.of(rows, columns, lines=lines)}"
        )


def describe_limits(spread: Variances, difference: float) -> str:
    """Return which variances are too large for a difference, and the values that treegen uses.

    Empty if the difference allows all variances.

    Args:
        spread: The variances.
        difference: The difference of two accuracies.
    """
    limited = limit_variances(spread, difference)
    parts = []
    for name, what in (
        ("between", "a variance between problems"),
        ("within", "a variance within problems"),
        ("correlation", "a correlation of the runs"),
    ):
        before, now = getattr(spread, name), getattr(limited, name)
        if abs(before - now) > _VISIBLE:
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
    num_problems: int | None = None
    """The number of available problems; None asks only how many are needed."""
    source: SpreadSource = SpreadSource()
    """Where the variances come from."""

    def rows(self, spread: Variances, ks: Iterable[int]) -> list[dict[str, Any]]:
        """Return the problems needed, and the available ones' half width, by number of samples."""
        rows: list[dict[str, Any]] = []
        for k in ks:
            needed = problems_for_half_width(spread, self.accuracy, k, self.half_width)
            row: dict[str, Any] = {"num_samples": k, "problems_needed": needed}
            if (num := self.num_problems) is not None:
                if not 1 <= num <= MOST_PROBLEMS:
                    raise InputError(
                        f"{arg('n_problems')} must be at least 1 and at most {MOST_PROBLEMS:,}, "
                        f"got {num!r:.40}"
                    )
                row["half_width"] = predict_half_width(spread, self.accuracy, num, k)
            rows.append(row)
        return rows

    def build_table(self, spread: Variances, rows: list[dict[str, Any]]) -> str:
        """Return the rows as a table."""
        columns = {
            "Samples each": "{0[num_samples]:,}",
            f"Problems for +-{self.half_width:g}": "{0[problems_needed]:,}",
        }
        if self.num_problems is not None:
            columns[f"Half width with {self.num_problems:,}"] = "{0[half_width]:.4f}"
        rough = self.source.describe_roughness()
        return (
            f"accuracy {self.accuracy:.3f}, {_describe_spread(spread, self.source)}\n"
            "the 95% interval of the accuracy of one run\n\n"
            f"{PrintableTable.of(rows, columns, lines=filter(None, [rough]))}"
        )


def _describe_spread(spread: Variances, source: SpreadSource) -> str:
    values = {"between problems": "between", "within": "within"}
    parts = [
        f"{label} {getattr(spread, name):.4f}{' (assumed)' if name in source.assumed else ''}"
        for label, name in values.items()
    ]
    return f"variance {', '.join(parts)}"


def _format_difference(row: dict[str, Any]) -> str:
    difference = row["difference_found"]
    return "none" if difference is None else f"{difference:.4f}"


def _read_correctness(view: RunView) -> dict[str, tuple[int, int]]:
    if not view.filters:
        raise InputError(f"the samples of {view.path} are not scored; score the run first")
    verdicts = view.verdicts(view.filters[0], fixed=True)
    return {
        i: (sum(v.correct for v in of_problem), len(of_problem))
        for i, of_problem in verdicts.items()
    }
