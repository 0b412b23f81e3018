"""`treegen usc`: the model picks its most consistent sample of each problem."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.options import QUIET, RUN, add_option_groups, option


@click.command("usc")
@RUN
@option(
    "--most N",
    "Show the model only the first N samples of a problem. Default: all.",
    type=click.IntRange(min=1),
)
@add_option_groups("reading", "trust")
@QUIET
def command(run: Path, most: int | None, trust_remote_code: bool, **reading: Any) -> None:
    """Let the model of RUN pick the most consistent sample of each problem.

    This is universal self-consistency: treegen shows the samples to the model that drew them. Each
    pick is stored at once; to continue after an interruption, repeat the command. `treegen score
    RUN --votes usc` then reports the picks next to maj@k.

    \f
    Args:
        run: The run directory.
        most: Number of samples of a problem to show to the model.
        trust_remote_code: Whether to run the code of the model's repository.
        **reading: Options of the group "reading", as for `load_run`.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.pipeline.rescoring import pick_run_samples

    terminal = Terminal()
    done = pick_run_samples(
        run, reading, terminal, terminal.count, most=most, trust_remote_code=trust_remote_code
    )
    echo(f"{done:,} problems have a pick; report them with: treegen score {run} --votes usc")
    json_line({"run": str(run), "picks": done})
