"""`treegen tasks`: the tasks that can be evaluated."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from treegen.cli.options.options import QUIET, option


@click.command("tasks")
@click.argument("names", nargs=-1, metavar="[TASK]...")
@option(
    "--lm-eval PATTERN",
    "List lm-eval's tasks, groups and tags whose names match, such as '*mmlu*', and what they "
    "need.",
    "pattern",
)
@option("--include-path DIR", "Additional folder of YAML files in lm-eval's format.")
@QUIET
def command(names: tuple[str, ...], pattern: str | None, include_path: str | None) -> None:
    """List all tasks, or show the version, defaults and arguments of each TASK.

    Name a task of your own by its file and class, path/to/file.py:Class, or by a YAML file in
    lm-eval's format, path/to/task.yaml.

    \f
    Args:
        names: Tasks to describe; none lists all tasks.
        pattern: Pattern of the names of lm-eval's tasks, groups and tags to list.
        include_path: Additional folder of YAML files in lm-eval's format.
    """
    from treegen.errors import InputError

    if pattern is not None:
        _list_lm_eval(pattern, include_path)
        return
    if include_path is not None:
        raise InputError("--include-path has no effect without --lm-eval; pass --lm-eval too")
    _list_bundled(() if names in {("list",), ("ls",)} else names)


def _list_lm_eval(pattern: str, folder: str | None) -> None:
    from dataclasses import astuple

    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import format_table
    from treegen.tasks.lm_eval.load import list_tasks

    listings = list_tasks(pattern, folder)
    rows = [[_format_default(cell) for cell in astuple(listing)] for listing in listings]
    head = ["lm-eval:", "Kind", "Output", "n-shot", "Needs"]
    echo(format_table(head, rows, right=(3,)) + "\n")
    json_line({"tasks": listings})


def _list_bundled(names: tuple[str, ...]) -> None:
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.registry import describe_tasks

    documents = describe_tasks(names)
    echo(_describe_tasks(documents) if names else _overview(documents))
    json_line({"tasks": documents})


def _overview(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return one line for each task, grouped; the tasks of other packages come last."""
    from treegen.common.formatting import safe_text
    from treegen.tasks.common.sources import bundled_rows

    # The tasks that come with treegen; a line has at most 80 columns.
    groups = {row["group"]: row["tasks"] for _, row in bundled_rows("tasks.jsonl")}
    names = [document["name"] for document in documents]
    width = max(map(len, names))
    parts = []
    for title, group in groups.items():
        lines = [f"  {name.ljust(width)}  {group[name]}" for name in group if name in names]
        parts += ["\n".join([title, *lines])] if lines else []
    listed = {name for group in groups.values() for name in group}
    plugins = [
        f"  {document['name'].ljust(width)}  "
        f"{document.get('error') or 'from ' + document['source']}"
        for document in documents
        if document["name"] not in listed
    ]
    parts += ["\n".join(["From other packages", *map(safe_text, plugins)])] if plugins else []
    parts.append(
        "treegen tasks NAME: defaults and arguments of a task\n"
        "treegen tasks --lm-eval PATTERN: tasks of lm-eval, evaluated as lm-eval:NAME"
    )
    return "\n\n".join(parts) + "\n"


def _describe_tasks(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of the versions, defaults and arguments of tasks."""
    from treegen.common.formatting import format_table

    defaults = ("version", "num_fewshot", "num_samples", "temperature", "max_tokens")
    rows = [
        [
            document["name"],
            *(_format_default(document.get(name)) for name in defaults),
            document["source"],
            document.get("error") or ", ".join(document["filters"]),
        ]
        for document in documents
    ]
    head = ["Task", "Version", "n-shot", "Samples", "Temperature", "Tokens", "From", "Filters"]
    text = format_table(head, rows, right=(1, 2, 3, 4, 5)) + "\n"
    arguments = [
        [document["name"], name, meaning]
        for document in documents
        for name, meaning in document.get("arguments", {}).items()
    ]
    if arguments:
        table = format_table(["Task", "--task-arg", "What it is"], arguments, right=())
        text += f"\n{table}\n"
    return text


def _format_default(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
