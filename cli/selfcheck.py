"""`treegen selfcheck`: whether samples depend on the rest of the batch, on this machine."""

from typing import Any

import click

from treegen.cli.options.choices import collect_choices
from treegen.cli.options.options import QUIET, add_option_groups, option


@click.command("selfcheck")
@option("--problems", "Problems of the job. Each has 8 samples.", "num_problems", default=16)
@add_option_groups("model")
@QUIET
def command(num_problems: int, **params: Any) -> None:
    """Run one job in many arrangements, and count the samples that stay the same.

    In another order, in part, one problem alone, with few rows, with few pages, resumed. The exit
    code is 1 where samples are promised to be the same (--reproducible, or float32 on a CPU) and
    are not.
    """
    from treegen import demo
    from treegen.cli.terminal.render import echo, json_line, tell
    from treegen.errors import InputError
    from treegen.model.options import EngineOptions

    if num_problems < 3:
        raise InputError(f"--problems must be at least 3, got {num_problems}")
    choices = collect_choices(params)
    if "model" not in choices:
        tell(f"{demo.MODEL_NOTICE}; give --model for yours")
    engine = EngineOptions(**{"model": demo.NAME, **choices})
    from treegen.api.selfcheck import self_check

    outcome = self_check(engine, num_problems)
    echo(str(outcome.table))
    json_line(outcome.document)
    if outcome.is_broken:
        raise click.exceptions.Exit(1)
