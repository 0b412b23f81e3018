"""`treegen selfcheck`: whether samples depend on what runs beside them, on this machine."""

from dataclasses import asdict
from typing import Any

import click

from treegen.cli.typed.options import QUIET, asked_for, options_of


@click.command("selfcheck")
@click.option("--problems", "num_problems", default=16, show_default=True,
              help="Problems of the job. Each has 8 samples.")  # fmt: skip
@options_of("model")
@QUIET
def command(num_problems: int, quiet: bool, **params: Any) -> None:
    """Run one job in many arrangements, and count the samples that stay the same.

    In another order, in part, one problem alone, with few rows, with few pages, resumed. The exit
    code is 1 where samples are promised to be the same (--reproducible, or float32 on a CPU) and
    are not.
    """
    from treegen import demo
    from treegen.cli.terminal.render import echo, json_line, notice
    from treegen.errors import InputError
    from treegen.evals.model import check_machine, look_at_model
    from treegen.model.options import EngineOptions

    if num_problems < 3:
        raise InputError(f"--problems must be at least 3, got {num_problems}")
    given = asked_for(params)
    if "model" not in given and not quiet:
        notice(demo.MODEL_NOTICE)
    engine = EngineOptions(**{"model": demo.NAME, **given})
    check_machine(engine)
    facts = look_at_model(engine)

    from treegen.bench.selfcheck import SelfCheck, arrangement_table

    check = SelfCheck(engine, problems=num_problems)
    found = list(check.arrangements())
    promised = engine.reproducible or (facts.device_type, facts.dtype) == ("cpu", "float32")
    if not quiet:
        echo(str(arrangement_table(found)))
    samples, same = (sum(getattr(each, name) for each in found) for name in ("samples", "same"))
    json_line(
        {
            "model": engine.model, "device": facts.device_type, "dtype": facts.dtype,
            "impl": check.usage.impl, "reproducible": engine.reproducible, "promised": promised,
            "samples": samples, "same": same,
            "arrangements": [asdict(each) for each in found],
        }
    )  # fmt: skip
    if promised and same < samples:
        raise click.exceptions.Exit(1)
