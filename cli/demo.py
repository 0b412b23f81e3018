"""`treegen demo`: a tour of treegen with the bundled model, on a CPU and offline."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.options.options import option

if TYPE_CHECKING:
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.evaluation import EvaluationResult
    from treegen.evals.pipeline.search import SearchRunResult
    from treegen.evals.scoring.code_execution import ExecutionOptions
    from treegen.llm import LLM

# The options that a user would type for each part; the others have the demo model's defaults.
_QUESTIONS: Final = {"task": "gsm8k", "limit": "20"}
_GRID: Final = {
    "task": "needle-grid",
    "extra": {"lengths": "2000-14000/5", "depths": "0-100/6"},
}
_PROGRAMS: Final = {"task": "apps", "limit": "10-35"}
_PUZZLES: Final = {"task": "countdown", "limit": "24"}
_METHODS: Final = ("sample", "tot-dfs")


@dataclass(frozen=True, slots=True)
class _Tour:
    """The loaded model, and the directory of the runs."""

    llm: "LLM"
    path: Path
    terminal: "Terminal"

    def evaluate(
        self, typed: dict[str, Any], execution: "ExecutionOptions | None" = None
    ) -> "EvaluationResult":
        """Run one evaluation as `treegen eval` does."""
        from treegen.evals.pipeline.evaluation import evaluate_all
        from treegen.evals.pipeline.execution import ModelLoader

        task, choices = self._fill_defaults(typed)
        return evaluate_all(
            [task],
            choices,
            ModelLoader(self.llm),
            self.terminal,
            output=str(self.path / task),
            execution=execution,
        )[0]

    def search(self, typed: dict[str, Any], method: str) -> "SearchRunResult":
        """Search a task's problems as `treegen search` does."""
        from treegen.evals.pipeline.execution import ModelLoader
        from treegen.evals.pipeline.search import search_all

        task, choices = self._fill_defaults({**typed, "method": method}, search=True)
        del choices["method"]
        return search_all(
            [method],
            {**choices, "task": task},
            ModelLoader(self.llm),
            self.terminal,
            output=str(self.path / task / method),
        )[0]

    def _fill_defaults(self, typed: dict[str, Any], **kwargs: bool) -> tuple[str, dict[str, Any]]:
        from treegen import demo

        choices = demo.fill_defaults(typed, **kwargs)
        del choices["model"]  # the model is loaded already
        return choices.pop("task"), choices


@click.command("demo")
@option("--output-path -o DIR", "Directory of the runs. Default: a new one in runs/.")
def command(output_path: str | None) -> None:
    """Take a tour of treegen with the bundled model, without a GPU and without a download.

    The tour shows a prompt tree, self-consistency, retrieval from a long text, programs scored by
    tests, and tree search. The tour takes about a minute and a half on two cores. You can open the
    run of each part with the other commands.
    """
    from treegen import demo
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, notice
    from treegen.errors import RunError
    from treegen.evals.pipeline.targets import new_path
    from treegen.runs.files import check_directory

    path = Path(output_path) if output_path else new_path("demo")
    check_directory(path)
    if os.path.isdir(path) and any(path.iterdir()):
        raise RunError(
            f"the directory {path} is not empty; choose another directory with --output-path"
        )
    start = time.monotonic()
    notice(f"{demo.NOTICE}; runs go to {path}")
    tour = _Tour(_load(), path, Terminal())
    parts: tuple[tuple[str, str, Callable[[_Tour], None]], ...] = (
        (
            "A prompt tree: 8 few-shot examples, 20 questions, 40 answers each",
            "treegen plan gsm8k --limit 20",
            _plan,
        ),
        (
            "Self-consistency: a vote of k answers, compared with one answer",
            "treegen eval gsm8k --limit 20",
            _vote,
        ),
        (
            "A fact in a long text, at every depth",
            "treegen eval needle-grid -T lengths=2000-14000/5 -T depths=0-100/6",
            _heat_map,
        ),
        (
            "Programs, run in a sandbox on tests that the model does not see",
            "treegen eval apps --limit 10-35 --allow-code-execution",
            _programs,
        ),
        (
            "Puzzles: search in a tree of steps, compared with whole solutions of as many tokens",
            f"treegen search countdown --compare {','.join(_METHODS)} --limit 24",
            _puzzles,
        ),
    )
    for number, (title, typed, show) in enumerate(parts, start=1):
        echo(f"\n{number}. {title}\n   $ {typed}\n")
        show(tour)
    echo(f"\nThe tour took {time.monotonic() - start:.0f} s. Its runs, with all samples, are:\n")
    for folder in sorted(file.parent for file in path.rglob("run.json")):
        echo(f"    {folder}")
    echo("\n`treegen show DIR` prints a run, and `treegen report DIR` writes it as an HTML page.")


def _load() -> "LLM":
    import torch
    from transformers.utils import logging

    from treegen import demo
    from treegen.llm import LLM

    # One thread: with such a small model, threads mostly wait for each other. The sandboxed
    # programs get the other cores.
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return LLM(demo.NAME, compile=False)  # compiling takes longer than most parts of the tour


def _plan(tour: _Tour) -> None:
    from treegen import demo
    from treegen.cli.terminal.render import echo
    from treegen.evals.config.eval_settings import resolve_eval_settings
    from treegen.evals.job import load_job

    echo(str(tour.llm.plan(load_job(resolve_eval_settings(demo.fill_defaults(_QUESTIONS))).tree)))


def _vote(tour: _Tour) -> None:
    from treegen.cli.terminal.render import echo
    from treegen.common.formatting import format_table
    from treegen.evals.progress.usage import format_sharing
    from treegen.report.tables import format_interval, number

    result = tour.evaluate(_QUESTIONS)
    report = result.report
    assert report is not None
    votes = [row for row in report.majority if row.filter == report.majority[0].filter]
    rows = [[str(row.k), number(row.value), format_interval(row)] for row in votes]
    echo("\n" + format_table(["k", "Right by vote of k", "95% interval"], rows, right=(0, 1, 2)))
    echo(f"\n{format_sharing(result.results['usage'])}")


def _heat_map(tour: _Tour) -> None:
    from treegen.cli.terminal.render import echo, save_heat_maps
    from treegen.report.plots.heat_map import draw_text

    result = tour.evaluate(_GRID)
    assert result.report is not None
    for grid in result.report.grids:
        echo("\n" + draw_text(grid))
    save_heat_maps(result.report, result.path)


def _programs(tour: _Tour) -> None:
    from treegen.cli.terminal.render import echo, notice
    from treegen.common.formatting import format_table
    from treegen.errors import TreegenError
    from treegen.evals.scoring.code_execution import ExecutionOptions
    from treegen.report.tables import format_interval, number

    try:
        report = tour.evaluate(_PROGRAMS, ExecutionOptions()).report
    except TreegenError as error:
        notice(f"skipped: {error}")
        return
    assert report is not None
    rows = [
        [row.metric, number(row.value), format_interval(row)]
        for row in report.metrics
        if row.metric.startswith("pass@")
    ]
    echo("\n" + format_table(["Metric", "Value", "95% interval"], rows, right=(1, 2)))


def _puzzles(tour: _Tour) -> None:
    from treegen.cli.terminal.render import echo
    from treegen.report.text import cost_table

    echo("\n" + cost_table([tour.search(_PUZZLES, method).results for method in _METHODS]))
