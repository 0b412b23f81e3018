"""Which methods beat plain sampling at equal tokens: `python examples/compare_methods.py DIR`.

It runs `treegen search` on the demo's puzzles for each method and budget, into directories that it
resumes if it was stopped, and compares each method with plain sampling, puzzle by puzzle.
"""

import subprocess
import sys
from pathlib import Path

import click

from treegen.evals.statistics.estimators import holm
from treegen.report.compare import compare_runs
from treegen.report.load import load_run

METHODS = {
    "sample": [],
    "beam": [],
    "dvts": [],
    "rebase": [],
    "tot-bfs": [],
    "tot-dfs": [],
    "best-first": [],
    "mcts": [],
    "mcts batch=1": ["-a", "batch=1"],
    "ab-mcts": [],
    "ab-mcts rule=a": ["-a", "rule=a"],
    "rstar": [],
}


def search(method: str, budget: int, folder: Path, more: list[str]) -> Path:
    """Search with one method, unless its run is finished."""
    path = folder / f"tokens-{budget}" / method.replace(" ", "-")
    command = [sys.executable, "-m", "treegen", "search", "countdown", "-q", "-o", str(path)]
    name, *_ = method.split()
    arguments = ["-m", name, *METHODS[method], "--budget", f"tokens={budget}", "--resume", *more]
    subprocess.run([*command, *arguments], check=True)
    return path


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--budgets", default="250,500,1000", show_default=True, help="Decoded tokens.")
@click.option("--methods", default=",".join(METHODS), help="Names as in the table.")
@click.argument("more", nargs=-1)
def main(folder: Path, budgets: str, methods: str, more: tuple[str, ...]) -> None:
    """Fill FOLDER with runs and print a table; MORE goes to `treegen search`.

    Each cell has the share of puzzles that were solved, how much more that is than by plain
    sampling, and the 95% interval of this difference over puzzles; bold if 0 is not in it. The last
    line names the differences whose p-value, adjusted for all of the table (Holm), is below 0.05.
    """
    limits = [int(budget) for budget in budgets.split(",")]
    plain = {limit: load_run(search("sample", limit, folder, list(more))) for limit in limits}
    comparisons = {
        (method, limit): compare_runs(
            plain[limit], load_run(search(method, limit, folder, list(more)))
        ).differences[0]
        for method in methods.split(",")
        for limit in limits
    }
    tested = [cell for cell in comparisons if cell[0] != "sample"]
    adjusted = dict(zip(tested, holm([comparisons[cell].p_value for cell in tested]), strict=True))
    print(f"|Method|{'|'.join(f'{limit:,} tokens' for limit in limits)}|")
    print("|------|" + "---|" * len(limits))
    for method in methods.split(","):
        cells = []
        for limit in limits:
            row = comparisons[method, limit]
            cells.append(f"{row.b:.2f}")
            if method != "sample" and row.low is not None and row.high is not None:
                mark = "**" if row.low > 0 or row.high < 0 else ""
                cells[-1] += f": {mark}{row.value:+.2f}{mark} ({row.low:+.2f} to {row.high:+.2f})"
        print(f"|{method}|{'|'.join(cells)}|")
    if len(tested) > 1:
        clear = [cell for cell, p in adjusted.items() if p is not None and p < 0.05]
        significant = ", ".join(f"{method} at {limit:,}" for method, limit in clear)
        print(f"\nAdjusted p < 0.05: {significant or 'none'}")


if __name__ == "__main__":
    main()
