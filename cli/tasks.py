"""`treegen tasks`: the tasks that can be evaluated."""

import click

from treegen.cli.options.options import QUIET


@click.command("tasks")
@click.argument("names", nargs=-1, metavar="[TASK]...")
@click.option(
    "--lm-eval",
    "pattern",
    metavar="PATTERN",
    help="List lm-eval's tasks, groups and "
    "tags with names like it, such as '*mmlu*', and what they need.",
)
@click.option(
    "--include-path",
    metavar="DIR",
    help="A further folder of lm-eval's kind of YAML files, for --lm-eval.",
)
@QUIET
def command(
    names: tuple[str, ...], pattern: str | None, include_path: str | None, quiet: bool
) -> None:
    """List tasks, all or those named: versions, defaults, arguments, and their packages.

    A task of your own is named by its file and class, path/to/file.py:Class, or is lm-eval's kind
    of YAML file, path/to/task.yaml.
    """
    from treegen.errors import InputError

    if pattern is not None:
        _list_lm_eval(pattern, include_path, quiet)
        return
    if include_path is not None:
        raise InputError("--include-path is for --lm-eval; give --lm-eval too")
    _list_own(() if names in {("list",), ("ls",)} else names, quiet)


def _list_lm_eval(pattern: str, folder: str | None, quiet: bool) -> None:
    from dataclasses import asdict

    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import format_table
    from treegen.tasks.lm_eval.load import list_tasks

    found = list_tasks(pattern, folder)
    if not quiet:
        head = ["lm-eval:", "Kind", "Output", "n-shot", "Needs"]
        rows = [
            [
                each.name,
                each.kind,
                each.output,
                "" if each.shots is None else str(each.shots),
                each.needs,
            ]
            for each in found
        ]
        echo(format_table(head, rows, right=(3,)) + "\n")
    json_line({"tasks": [asdict(each) for each in found]})


def _list_own(names: tuple[str, ...], quiet: bool) -> None:
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import format_table
    from treegen.evals.registry import describe_tasks

    documents = describe_tasks(names)
    if not quiet:
        names = ("version", "num_fewshot", "num_samples", "temperature", "max_tokens")
        rows = [
            [
                each["name"],
                *(_format_default(each.get(name)) for name in names),
                each["source"],
                each.get("error") or ", ".join(each["filters"]),
            ]
            for each in documents
        ]
        head = ["Task", "Version", "n-shot", "Samples", "Temperature", "Tokens", "From", "Filters"]
        echo(format_table(head, rows, right=(1, 2, 3, 4, 5)) + "\n")
        arguments = [
            [document["name"], name, told]
            for document in documents
            for name, told in document.get("arguments", {}).items()
        ]
        if arguments:
            echo(format_table(["Task", "--task-arg", "What it is"], arguments, right=()) + "\n")
    json_line({"tasks": documents})


def _format_default(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
