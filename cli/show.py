"""`treegen show`: a run in the terminal: all of it, one problem, or one tree."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.options.options import (
    ALL_FILTERS,
    QUIET,
    RUN,
    add_option_groups,
    is_json_requested,
    is_quiet,
    option,
)

if TYPE_CHECKING:
    from treegen.report.view import RunView, StoredTree

_WIDTH: Final = 200


@click.command("show")
@RUN
@option("--problem -p ID", "Show one problem with its samples and their votes.")
@option("--tree -t ID", "Show the tree of one problem: its search, or its prompt and samples.")
@option(
    "--as FORMAT",
    "With --tree, print the tree for Graphviz (dot) or Mermaid.",
    "written_as",
    type=click.Choice(("dot", "mermaid")),
)
@option("--filter NAME", "Extract answers with this filter.", "filter_name")
@option("--full", "Print whole texts and list every problem.")
@add_option_groups("reading")
@ALL_FILTERS
@QUIET
def command(
    run: Path,
    problem: str | None,
    tree: str | None,
    written_as: str | None,
    filter_name: str | None,
    full: bool,
    all_filters: bool,
    **load_options: Any,
) -> None:
    """Show the directory RUN: its metrics and problems, one problem, or one tree.

    \f
    Args:
        run: The run directory.
        problem: Id of a problem to show with its samples and their votes.
        tree: Id of a problem whose tree to show.
        written_as: Form of the tree: dot or mermaid.
        filter_name: Name of the filter that extracts answers.
        full: Whether to print whole texts and list every problem.
        all_filters: Whether to show the results of every filter, not only of the first.
        **load_options: Options of the "reading" option group; see `load_run`.
    """
    from treegen.errors import InputError

    if problem is not None and tree is not None:
        raise InputError(
            "--problem and --tree cannot be used together; remove one of the two options"
        )
    if written_as is not None and tree is None:
        raise InputError("--as has no effect without --tree; pass --tree ID too")
    if written_as is not None and is_json_requested():
        raise InputError("--as and --json cannot be used together; remove one of the two options")
    from treegen.cli.terminal.render import echo, json_line, read_run
    from treegen.report import run_document

    view = read_run(run, load_options)
    filter = run_document.filter_of(view, filter_name)
    problem_id = problem if problem is not None else tree
    if problem_id is None:
        document = _show_run(view, filter, full=full, all_filters=all_filters)
        json_line({"run": str(run), **document})
        return
    problem_view = run_document.problem_of(view, problem_id)
    trees = run_document.trees_of(view, problem_view, filter) if tree is not None else []
    if written_as is not None:
        # The output is for another program, so nothing else is printed.
        for stored_tree in trees:
            text = stored_tree.to_dot() if written_as == "dot" else stored_tree.to_mermaid()
            echo(text.removesuffix("\n"), always=True)
        return
    if trees:
        document = run_document.trees_document(trees, problem_view.id)
        if not (is_quiet() or is_json_requested()):
            _draw_trees(trees, problem_view.id, full=full)
    else:
        document = run_document.problem_document(problem_view, filter)
        echo(run_document.problem_text(view, problem_view, filter, full=full))
    json_line({"run": str(run), **document})


def _show_run(view: "RunView", filter: str, *, full: bool, all_filters: bool) -> dict[str, Any]:
    """Print the metrics and problems of a run, and return its document.

    Args:
        view: The run.
        filter: The filter that reads the answers.
        full: Whether to print texts in full.
        all_filters: Whether to print the results of every filter.
    """
    from treegen.cli.terminal.render import echo, show_headline, show_report
    from treegen.report import run_document
    from treegen.report.run_settings import describe_view

    shares = run_document.get_vote_shares(view, filter)
    title = describe_view(view)
    show_report(view.results, view.report, title=title, unit=view.unit, all_filters=all_filters)
    echo(run_document.problems_text(view, shares, full=full))
    show_headline(describe_view(view, short=True), view.report, view.path)
    return run_document.run_document(view, shares)


def _draw_trees(trees: "Sequence[StoredTree]", problem_id: str, *, full: bool) -> None:
    """Print the trees of a problem.

    Args:
        trees: The trees.
        problem_id: The id of the problem.
        full: Whether to print texts in full.
    """
    from rich.console import Console

    from treegen.cli.terminal.render import echo
    from treegen.report import run_document

    for tree in trees:
        name = run_document.tree_name(tree) if len(trees) > 1 else problem_id
        echo(run_document.tree_title(tree, name))
        # A file or a pipe has no width, so use a wide one.
        width = None if sys.stdout.isatty() else _WIDTH
        console = Console(file=sys.stdout, width=width, highlight=False)
        console.print(tree.draw(full=full))
        if legend := run_document.tree_legend(tree):
            echo(f"({legend})")
        echo("")
