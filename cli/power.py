"""`treegen power`: how many problems and samples show a difference, or give a narrow interval."""

from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from treegen.cli.options.choices import whole_numbers
from treegen.cli.options.options import PATH, QUIET, add_option_groups, option
from treegen.errors import InputError

_SAMPLES: Final = (1, 4, 16, 64)
_OF_TWO_RUNS: Final = {
    "difference": "--difference",
    "correlation": "--correlation",
    "target_power": "--power",
    "alpha": "--alpha",
}


@click.command("power")
@option("--difference", "Difference of the accuracies of two runs.", default=0.02)
@option(
    "--half-width W",
    "Instead of a difference: distance from one run's accuracy to the farther end of its 95% "
    "interval.",
    type=float,
)
@option(
    "--run RUN",
    "Run to estimate the variances from. Give it twice to also estimate the correlation; with "
    "fewer than 50 problems, the estimates are rough.",
    "runs",
    multiple=True,
    type=PATH,
)
@option("--n-problems N", "Available problems. Default: the run's problems.", type=int)
@option(
    "--n-samples -n 1,8,64",
    "Samples per problem. Default: 1,4,16,64 and the run's number.",
    "num_samples",
)
@option(
    "--between",
    "Variance of p across problems; p: probability of a correct sample. Default: 0.1, or the "
    "run's.",
    type=float,
)
@option("--within", "Mean of p (1 - p) across problems. Default: 0.1, or the run's.", type=float)
@option(
    "--correlation",
    "Correlation of p in the two runs; 0 if their problems differ. Default: 0.5, or the runs'.",
    type=float,
)
@option("--power", "Probability of detecting the difference.", "target_power", default=0.8)
@option(
    "--alpha",
    "False-positive rate: probability of finding a difference when there is none.",
    default=0.05,
)
@add_option_groups("reading")
@QUIET
def command(
    difference: float,
    half_width: float | None,
    runs: tuple[Path, ...],
    n_problems: int | None,
    num_samples: str | None,
    between: float | None,
    within: float | None,
    correlation: float | None,
    target_power: float,
    alpha: float,
    **reading: Any,
) -> None:
    """Print how many problems detect a difference between two runs of the same problems.

    The command assumes the paired test of `treegen compare` on each problem's share of correct
    samples. With --half-width, it prints how many problems make the interval of one run so narrow.

    \f
    Args:
        difference: Difference of the accuracies of two runs.
        half_width: Distance from the accuracy of one run to the farther end of its interval.
        runs: Run directories to take the variances from.
        n_problems: Available problems.
        num_samples: Samples per problem.
        between: Variance over problems of p, the probability of a correct sample.
        within: Mean of p (1 - p) over problems.
        correlation: Correlation of p in the two runs.
        target_power: Probability to detect the difference.
        alpha: Probability to detect a difference if there is none.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.render import echo, json_line, tell
    from treegen.common.formatting import safe_text
    from treegen.report.changed_scores import ChangedNotice
    from treegen.report.load import load_run
    from treegen.report.power_analysis import (
        PowerQuery,
        PrecisionQuery,
        choose_variances,
        count_problems_and_samples,
        find_accuracy,
    )
    from treegen.report.run_settings import describe_view

    if half_width is not None:
        _reject_options_of_two_runs()
    views = [load_run(path, **reading) for path in runs]
    variances, source = choose_variances(views, between, within, correlation)
    num_problems, ks_of_runs = count_problems_and_samples(views)
    requested_ks = whole_numbers(num_samples, "--n-samples") if num_samples is not None else None
    ks = sorted({*_SAMPLES, *ks_of_runs} if requested_ks is None else {*requested_ks})
    n_problems = num_problems if n_problems is None else n_problems
    query: PowerQuery | PrecisionQuery
    names = ["between", "within"]
    if half_width is None:
        query = PowerQuery(difference, target_power, alpha, n_problems, source)
        options = {"difference": difference, "power": target_power, "alpha": alpha}
        names.append("correlation")
    else:
        query = PrecisionQuery(half_width, find_accuracy(views, variances), n_problems, source)
        options = {"half_width": half_width, "accuracy": query.accuracy}
    rows = query.rows(variances, ks)
    for view in views:
        for line in (line for line in view.notices if isinstance(line, ChangedNotice)):
            tell(f"{view.path}: {line}")
        echo(f"{safe_text(view.name)}: {describe_view(view)}; {len(view.problems):,} problems")
    echo(f"{query.build_table(variances, rows)}\n")
    json_line(
        {
            **options,
            "num_problems": n_problems,
            **{name: getattr(variances, name) for name in names},
            "assumed": [name for name in source.assumed if name in names],
            "num_estimated_from": source.num_problems,
            "rows": rows,
            **({"limits": query.limits(variances, rows)} if isinstance(query, PowerQuery) else {}),
        }
    )


def _reject_options_of_two_runs() -> None:
    """Raise InputError if an option of a comparison was passed."""
    context = click.get_current_context()
    for name, flag in _OF_TWO_RUNS.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise InputError(
                f"{flag} has no effect with --half-width, which needs only one run; remove {flag}"
            )
