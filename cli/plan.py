"""`treegen plan`: what a run would share, store and read, without loading weights."""

from typing import Any

import click

from treegen.cli.options.choices import collect_choices, collect_tasks
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import QUIET, WRITE_OUT, add_option_groups


@click.command(
    "plan",
    cls=GroupedCommand,
    file=True,
    examples=("treegen plan gsm8k --n-samples 64 --model Qwen/Qwen3-0.6B",),
)
@add_option_groups("task", "data", "arguments", "model", "sampling")
@WRITE_OUT
@QUIET
def command(write_out: bool, **params: Any) -> None:
    """Show the prompt tree of each TASK by level: tokens, bytes, rows that fit, and sharing.

    The command reads the tokenizer and the configuration of the model, but no weights.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.pipeline.evaluation import plan_tasks
    from treegen.report.plan_document import plan_document, plan_text

    terminal = Terminal()
    documents = []
    tasks = collect_tasks(params)
    for prepared in plan_tasks(tasks, collect_choices(params), terminal, show_prompts=write_out):
        documents.append(plan_document(prepared.job, prepared.facts, prepared.plan))
        echo(plan_text(documents[-1], prepared.plan.levels()) + "\n")
    json_line({"plans": documents})
