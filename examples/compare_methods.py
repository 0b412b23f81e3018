"""Which methods beat plain sampling at equal tokens: `python examples/compare_methods.py DIR`.

It runs `treegen search` on the demo's puzzles for each method and budget, into directories that it
resumes if it was stopped, and compares each method with plain sampling, puzzle by puzzle.
"""

import subprocess
import sys
from pathlib import Path

import click

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
    given = ["-m", name, *METHODS[method], "--budget", f"tokens={budget}", "--resume", *more]
    subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL)
    return path


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--budgets", default="250,500,1000", show_default=True, help="Decoded tokens.")
@click.option("--methods", default=",".join(METHODS), help="Names as in the table.")
@click.argument("more", nargs=-1)
def main(folder: Path, budgets: str, methods: str, more: tuple[str, ...]) -> None:
    """Fill FOLDER with runs and print a table; MORE goes to `treegen search`."""
    print("|Method|Tokens|Solved|Decoded|More than sample|95% interval|p|")
    print("|------|-----:|-----:|------:|---------------:|-----------:|-:|")
    for budget in map(int, budgets.split(",")):
        base = load_run(search("sample", budget, folder, list(more)))
        for method in methods.split(","):
            run = load_run(search(method, budget, folder, list(more)))
            found = compare_runs(base, run)
            (row,), tokens = found.differences, found.tokens
            assert tokens is not None
            cells = [f"`{method}`", f"{budget:,}", f"{row.b:.2f}"]
            cells += [f"{tokens.b / len(found.problem_ids):.0f}"]
            if method != "sample":
                cells += [f"{row.value:+.2f}", f"{row.low:+.2f} to {row.high:+.2f}"]
                cells += [f"{row.p_value:.4f}"]
            print(f"|{'|'.join(cells)}{'|||' if method == 'sample' else ''}|", flush=True)


if __name__ == "__main__":
    main()
