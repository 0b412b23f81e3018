"""`treegen compare`: whether one run is better than another, problem by problem."""

import os
import shlex
from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import ALL_FILTERS, PATH, QUIET, add_option_groups, option


@click.command("compare")
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
@add_option_groups("reading")
@option("--partial", "Leave out problems that a run has not finished.")
@option("--output-path -o DIR", "Folder for the plots. Default: a folder in RUN_B.", type=PATH)
@option("--no-plots", "Do not write plots.")
@option(
    "--html FILE.html",
    "Also write a page with the samples of both runs side by side.",
    type=click.Path(dir_okay=False, path_type=Path),
)
@ALL_FILTERS
@QUIET
def command(
    run_a: Path,
    run_b: Path,
    partial: bool,
    output_path: Path | None,
    no_plots: bool,
    html: Path | None,
    all_filters: bool,
    **reading: Any,
) -> None:
    """Compare RUN_B with RUN_A on the same problems, by paired tests with intervals.

    Differences are B - A; above zero, B is better. Comparing runs with
    different problems is an error.

    \f
    Args:
        run_a: The first run directory.
        run_b: The run directory to compare with it.
        partial: Whether to leave out problems that a run has not finished.
        output_path: Folder of the plots; None for a folder in `run_b`.
        no_plots: Whether to write no plots.
        html: Page to write, with the samples of both runs side by side.
        all_filters: Whether to show the results of every filter, not only of the first.
        **reading: Options of the "reading" option group; see `load_run`.
    """
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.files import file_name
    from treegen.common.formatting import safe_text
    from treegen.errors import InputError
    from treegen.report.compare import compare_runs
    from treegen.report.html_page import check_name, write_page
    from treegen.report.load import load_run
    from treegen.report.match_runs import match_runs
    from treegen.report.plots.runs import comparison_plots
    from treegen.runs.files import check_no_link

    if output_path is not None and no_plots:
        raise InputError(
            "--output-path and --no-plots cannot be used together; remove one of the two options"
        )
    if html is not None:
        check_name(html, "--html")
    a, b = match_runs(*(load_run(path, **reading) for path in (run_a, run_b)))
    comparison = compare_runs(a, b, partial=partial)
    listing = comparison.listing(all_filters=all_filters, more="--all-filters shows them")
    echo(f"{listing}")
    conditions = _warn_of_certificates(run_a, run_b)
    files: list[Path] = []
    if not no_plots:
        if (folder := output_path) is None:
            check_no_link(run_b, folder := run_b / f"compared_with_{file_name(a.name)}")
        for plot in comparison_plots(comparison):
            files += plot.render().save(folder)
        echo(f"plots: {safe_text(str(folder))}\n")
    if html is None:
        echo("to see the samples side by side, pass --html FILE.html\n")
    else:
        write_page([a, b], html, plots=False, comparison=comparison)
        echo(f"page: {safe_text(str(html))}\n")
    paths = {"run_a": str(run_a), "run_b": str(run_b)}
    json_line(
        {
            **paths,
            **comparison.to_json(),
            "certified_differences": conditions,
            "plots": [str(path) for path in files],
            "page": None if html is None else str(html),
        }
    )


def _warn_of_certificates(run_a: Path, run_b: Path) -> list[str]:
    """Warn of differences between the certificates of two runs, and return all but the model."""
    from treegen.cli.terminal.render import notice
    from treegen.report.certify.document import FILE, find_other_conditions, load_own_certificate

    first, second = certificates = [load_own_certificate(run) for run in (run_a, run_b)]
    for run, certificate in zip((run_a, run_b), certificates, strict=True):
        if certificate is None and os.path.isfile(file := run / FILE):
            notice(
                f"Warning: {file} does not belong to the present samples and settings of the run; "
                f"to see what differs: treegen certify --check {shlex.quote(str(file))}"
            )
    conditions = find_other_conditions(first, second) if first and second else []
    if conditions:
        notice(f"Warning: the certificates differ in more than the model: {', '.join(conditions)}")
    return conditions
