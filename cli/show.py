"""`treegen show`: a run in the terminal: all of it, one problem, or one tree."""

import sys
from pathlib import Path
from typing import Any, Final

import click

from treegen.cli.options.options import (
    ALL_FILTERS,
    QUIET,
    add_option_groups,
    is_json_requested,
)

_WIDTH: Final = 200


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--problem", "-p", metavar="ID", help="One problem: its samples and their votes.")
@click.option(
    "--tree",
    "-t",
    metavar="ID",
    help="One problem as a tree: its search, or its prompt with the samples below.",
)
@click.option(
    "--as",
    "written_as",
    type=click.Choice(("dot", "mermaid")),
    metavar="FORMAT",
    help="With --tree: write it for Graphviz (dot) or mermaid.",
)
@click.option("--filter", "filter_name", metavar="NAME", help="Read answers by this filter.")
@click.option("--full", is_flag=True, help="Whole texts, and every problem in the list.")
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
    quiet: bool,
    **asked: Any,
) -> None:
    """Show what the directory RUN holds: metrics and problems, one problem, or one tree."""
    from treegen.errors import InputError

    if problem is not None and tree is not None:
        raise InputError("give --problem or --tree, not both")
    if written_as is not None and tree is None:
        raise InputError("--as is of a tree; give --tree ID with it")
    if written_as is not None and is_json_requested():
        raise InputError("--as and --json are two formats; leave one out")
    from rich.console import Console

    from treegen.cli.terminal.render import echo, json_line, read_run, show_headline, show_report
    from treegen.report import run_document
    from treegen.report.run_settings import describe_view

    view = read_run(run, asked, quiet=quiet)
    filter = run_document.filter_of(view, filter_name)
    wanted = problem if problem is not None else tree
    if wanted is None:
        shares = run_document.shares_of(view, filter)
        document = run_document.run_document(view, shares)
        if not quiet:
            results = {
                "usage": view.usage,
                "done": view.num_done,
                "planned": view.info.planned,
                "versions": view.info.versions,
            }
            show_report(
                results,
                view.report,
                title=describe_view(view),
                unit=view.unit,
                all_filters=all_filters,
            )
            echo(run_document.problems_text(view, shares, full=full))
            show_headline(describe_view(view, short=True), view.report, view.path)
    else:
        found = run_document.problem_of(view, wanted)
        trees = run_document.trees_of(view, found, filter) if tree is not None else []
        if written_as is not None:
            # The output is for another program, so nothing else is printed.
            for each in trees:
                text = each.to_dot() if written_as == "dot" else each.to_mermaid()
                echo(text.removesuffix("\n"))
            return
        if trees:
            document = run_document.trees_document(trees, found.id)
            for each in trees if not (quiet or is_json_requested()) else ():
                name = run_document.tree_name(each) if len(trees) > 1 else found.id
                echo(run_document.tree_title(each, name))
                # A file or a pipe has no width, so use a wide one.
                width = None if sys.stdout.isatty() else _WIDTH
                console = Console(file=sys.stdout, width=width, highlight=False)
                console.print(each.draw(full=full))
                echo("")
        else:
            document = run_document.problem_document(found, filter)
            if not quiet:
                echo(run_document.problem_text(view, found, filter, full=full))
    json_line({"run": str(run), **document})
