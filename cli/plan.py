"""`treegen plan`: what a run would share, store and read, before any weight is loaded."""

from typing import Any

import click

from treegen.cli.typed.grouped import Grouped
from treegen.cli.typed.options import QUIET, WRITE_OUT, asked_for, options_of, task_names


@click.command(
    "plan",
    cls=Grouped,
    file=True,
    examples=("treegen plan gsm8k --n-samples 64 --model Qwen/Qwen3-0.6B",),
)
@options_of("task", "data", "arguments", "model", "sampling")
@WRITE_OUT
@QUIET
def command(write_out: bool, quiet: bool, **params: Any) -> None:
    """Show the prompt tree of each TASK by level: tokens, bytes, rows that fit, and what is shared.

    Needs the model's tokenizer and configuration only.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.running.planning import plan_tasks
    from treegen.report.planned import plan_document, plan_text

    terminal = Terminal(quiet=quiet)
    documents = []
    tasks = task_names(params)
    for job, facts, plan in plan_tasks(tasks, asked_for(params), terminal, show_prompts=write_out):
        documents.append(plan_document(job, facts, plan))
        if not quiet:
            echo(plan_text(documents[-1], plan.levels()) + "\n")
    json_line({"plans": documents})
