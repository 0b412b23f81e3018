"""`treegen compare`: whether one run is better than another, problem by problem."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treegen.cli.options import CONTEXT, QUIET

if TYPE_CHECKING:
    from treegen.report.compare import Comparison, Tokens

_RUN = click.Path(path_type=Path)


@click.command("compare", context_settings=CONTEXT)
@click.argument("run_a", type=_RUN)
@click.argument("run_b", type=_RUN)
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@click.option("--partial", is_flag=True, help="Leave out problems that a run has not finished.")
@click.option("--output-path", "-o", type=_RUN, metavar="DIR",
              help="Where the plots go. Default: a folder in RUN_B.")  # fmt: skip
@click.option("--no-plots", is_flag=True, help="Print the numbers only.")
@QUIET
def command(
    run_a: Path,
    run_b: Path,
    data: str | None,
    partial: bool,
    output_path: Path | None,
    no_plots: bool,
    quiet: bool,
) -> None:
    """Compare RUN_B with RUN_A on the same problems, with intervals and tests for pairs.

    A difference is B minus A, so above zero B is better. Runs whose problems differ are refused.
    """
    from treegen.cli.destinations import file_name
    from treegen.cli.render import echo, json_line
    from treegen.formats import safe_text
    from treegen.report.compare import compare_runs
    from treegen.report.comparison_plots import comparison_plots
    from treegen.report.load import load_run

    a, b = (load_run(path, data=data) for path in (run_a, run_b))
    found = compare_runs(a, b, partial=partial)
    if not quiet:
        echo(_table(found))
    files: list[Path] = []
    if not no_plots:
        folder = output_path or run_b / f"compared_with_{file_name(a.name)}"
        for plot in comparison_plots(found):
            files += plot.save(folder)
        if not quiet:
            echo(f"plots: {safe_text(str(folder))}\n")
    paths = {"run_a": str(run_a), "run_b": str(run_b)}
    json_line({**paths, **found.to_json(), "plots": [str(path) for path in files]})


def _table(found: "Comparison") -> str:
    from treegen.cli.tables import markdown
    from treegen.formats import safe_text
    from treegen.report.tables import interval

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
    head = ["Filter", "Metric", "A", "B", "B - A", "95% interval", "p", "t-test", "Better", "Worse"]
    left_out = f"; {len(found.left_out):,} unfinished ones left out" if found.left_out else ""
    lines = [
        f"A: {found.a}\nB: {found.b}\n{len(found.problem_ids):,} problems, paired{left_out}",
        "",
        markdown(head, rows, right=range(2, len(head))),
        "",
    ]
    for method in dict.fromkeys(row.method for row in found.differences):
        names = dict.fromkeys(row.metric for row in found.differences if row.method == method)
        lines.append(f"{', '.join(names)}: {method}")
    if found.tokens is not None:
        lines.append(_tokens(found.tokens))
    return safe_text("\n".join(lines))


def _tokens(found: "Tokens") -> str:
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
