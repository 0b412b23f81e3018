"""`treegen bench` and `treegen selfcheck`: measure and check this machine."""

from typing import Any

import click

from treegen.cli.bench.attention import attention
from treegen.cli.bench.cluster import cluster
from treegen.cli.bench.decode import decode, prefill
from treegen.cli.options.choices import collect_choices
from treegen.cli.options.options import QUIET, add_option_groups, option


@click.group("bench")
def bench() -> None:
    """Measure treegen's speed on this machine."""


for _part in (attention, decode, prefill, cluster):
    bench.add_command(_part)


@click.command("selfcheck")
@option("--problems", "Number of problems, with 8 samples each.", "num_problems", default=16)
@add_option_groups("model")
@QUIET
def selfcheck(num_problems: int, **params: Any) -> None:
    """Run one job in several ways, and count the samples that stay the same.

    The ways are: in another order, in part, one problem alone, with few rows, with few pages, and
    resumed. The exit code is 1 if samples differ although treegen guarantees that they are equal:
    with --reproducible, or in float32 on a CPU.
    """
    from treegen import demo
    from treegen.cli.terminal.render import echo, json_line, tell
    from treegen.errors import InputError
    from treegen.model.options import EngineOptions

    if num_problems < 3:
        raise InputError(f"--problems must be at least 3, got {num_problems}")
    choices = collect_choices(params)
    if "model" not in choices:
        tell(f"{demo.MODEL_NOTICE}; use --model for your own")
    engine = EngineOptions(**{"model": demo.NAME, **choices})
    from treegen.api.selfcheck import self_check

    outcome = self_check(engine, num_problems)
    echo(str(outcome.table))
    json_line(outcome.document)
    if outcome.is_broken:
        raise click.exceptions.Exit(1)
